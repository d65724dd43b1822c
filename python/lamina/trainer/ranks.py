# SPDX-License-Identifier: Apache-2.0
"""The copies of the model in a Trainer's job, and their ranks."""

from typing import Any

from lamina._lamina import BatchRecord
from lamina.job import current
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD, CommGroup, size


def gathered(own: Any, group: CommGroup) -> list[Any]:
    """Lists what each rank of the group has; in a job of one rank nothing is sent."""
    return [own] if size() == 1 else allgather(own, group)


def together(own: BatchRecord) -> BatchRecord:
    """The record of all ranks, in one exchange of fixed size; in a job of one rank nothing is sent."""
    return own if size() == 1 else own.together(current.outside_step("allgather()").session)


def speaks() -> bool:
    """Tells whether this rank gives the numbers of its copy. One of each copy does, and it leads."""
    return 0 in current.session().group_members("replicas")


def leads() -> bool:
    """Tells whether this rank runs the bodies of its copy's steps, for which it reads the data."""
    return current.session().leads


def copies() -> int:
    """How many copies of the model read batches of their own."""
    return current.session().group_size("replicas")


def own_copy() -> int:
    """The number of this rank's."""
    return current.session().group_rank("replicas")


def of_each_copy(own: Any) -> list[Any]:
    """Lists what the first rank of each copy has, in the order of the copies."""
    found: dict[int, Any] = {}
    for number, theirs in gathered((own_copy(), own), WORLD):
        found.setdefault(number, theirs)
    return [found[number] for number in sorted(found)]
