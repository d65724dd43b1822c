# SPDX-License-Identifier: Apache-2.0
"""Contexts in which one rank of each machine goes before the others."""

import contextlib
from collections.abc import Iterator

from lamina.dist import ranks
from lamina.dist.collectives import all_gather_object, alone
from lamina.exits.failures import describe, rebuild


@contextlib.contextmanager
def run_local_rank_zero_first() -> Iterator[None]:
    """Runs the body on local rank 0 of every machine first, and then, when all of these have ended it, on the others:
    to download once what all read. The others wait at most the timeout of `initialize_dist`; for longer work see
    `busy_wait_for_local_rank_zero`.

    Errors:
        RemoteError: a local rank 0 raised in the body; that rank gets its own exception.
    """
    if alone("run_local_rank_zero_first()"):
        yield
        return
    first = ranks.get_local_rank() == 0
    if not first:
        share_failures(None)
    try:
        yield
    except BaseException as error:
        if first:
            tell(error)
        raise
    if first:
        share_failures(None)


def share_failures(failure: tuple | None) -> None:
    """Collective: each rank brings what went wrong, as `describe` gives it, or None; the first is raised everywhere."""
    for each in all_gather_object(failure):
        if each is not None:
            raise rebuild(*each)


def tell(error: BaseException) -> None:
    """This rank's part in `share_failures` when it has failed and raises its own error: all that the others need."""
    with contextlib.suppress(Exception):  # the others are gone; the error to look at is this one
        all_gather_object(describe(error, ranks.get_global_rank()))
