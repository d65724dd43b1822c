# SPDX-License-Identifier: Apache-2.0
"""Objects between ranks, outside step functions. Anything picklable travels; tensors travel as tensors."""

from typing import Any

from lamina.errors import UsageError
from lamina.job import current
from lamina.job.ranks import CommGroup, RankType
from lamina.util import pytree

_CHANNEL = "user"


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Sends an object to one rank, which receives it with `recv_from`. What one rank sends another arrives in order.

    Args:
        obj: any picklable object.
        dest_rank: the receiver, counted as `rank_type` says.
        rank_type: RankType.WORLD_RANK, RankType.PP_RANK, ...

    Errors:
        UsageError: no such rank, this rank itself, or called inside a step function.
        PeerError: the receiver is gone.
    """
    session = current.outside_step("send()").session
    session.send(_other(session, dest_rank, rank_type, "send()"), _CHANNEL, obj)


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """The next object that `src_rank` sent or broadcast to this rank; waits for it.

    Args:
        src_rank: the sender, counted as `rank_type` says.
        rank_type: RankType.WORLD_RANK, RankType.PP_RANK, ...

    Errors:
        UsageError: no such rank, this rank itself, or called inside a step function.
        PeerError: the sender is gone. TimeoutError: nothing came in time.
    """
    session = current.outside_step("recv_from()").session
    return session.receive(_other(session, src_rank, rank_type, "recv_from()"), _CHANNEL)


def broadcast(obj: Any, group: CommGroup) -> None:
    """Sends an object to every other rank of a group; each of them calls `recv_from`. Nothing in a group of one.

    Args:
        obj: any picklable object.
        group: CommGroup.WORLD, CommGroup.PP_GROUP, ...

    Errors:
        UsageError: called inside a step function. PeerError: a receiver is gone.
    """
    job = current.outside_step("broadcast()")
    session = job.session
    if pytree.tensors(obj):
        job.replicas.share_batches()
    for member in session.group_members(CommGroup(group).value):
        if member != session.rank:
            session.send(member, _CHANNEL, obj)


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """The objects of all ranks of a group, in the order of the group; each of them calls this.

    Args:
        obj: this rank's, any picklable object.
        group: CommGroup.WORLD, CommGroup.DP_GROUP, ...

    Errors:
        UsageError: called inside a step function. PeerError, TimeoutError: a rank is gone or does not come.
    """
    return current.outside_step("allgather()").session.all_gather(CommGroup(group).value, obj)


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Returns once every rank of the group has called it.

    Errors:
        UsageError: called inside a step function. PeerError, TimeoutError: a rank is gone or does not come.
    """
    current.outside_step("barrier()").session.barrier(CommGroup(group).value)


def dp_barrier() -> None:
    """`barrier(CommGroup.DP_GROUP)`."""
    barrier(CommGroup.DP_GROUP)


def mp_barrier() -> None:
    """`barrier(CommGroup.MP_GROUP)`."""
    barrier(CommGroup.MP_GROUP)


def _other(session: Any, index: int, rank_type: RankType, what: str) -> int:
    """The world rank of another rank."""
    kind = RankType(rank_type)
    size = session.group_size(kind.value)
    if not 0 <= index < size:
        raise UsageError(f"{what}: there is no {kind.name} {index}, only 0 to {size - 1}", code="group-no-rank")
    rank = session.translate(kind.value, index)
    if rank == session.rank:
        raise UsageError(f"{what}: {kind.name} {index} is this rank itself", code="group-no-rank")
    return rank
