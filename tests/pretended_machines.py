# SPDX-License-Identifier: Apache-2.0
"""Machines that are none: ranks of one, which are told of several."""

import os

from lamina.job import groups


def pretend_machines(ranks_each: int) -> None:
    """Has this rank's environment tell of machines with so many ranks each, and its groups share no memory."""
    rank = int(os.environ["RANK"])
    told = {"NODE_RANK": rank // ranks_each, "LOCAL_RANK": rank % ranks_each, "LOCAL_WORLD_SIZE": ranks_each}
    os.environ.update({name: str(value) for name, value in told.items()})
    groups._backends = lambda session: "gloo"
