# SPDX-License-Identifier: Apache-2.0
"""Tensors and objects between ranks, over torch's process groups. In a world of one each rank is everybody."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lamina.dist import ranks
from lamina.errors import Error, PeerError, TimeoutError, UsageError, refusal
from lamina.job import current

_OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Returns when every rank has called it."""
    _together("barrier()", dist.barrier, group)


def all_reduce(tensor: Tensor, reduce_operation: str = "SUM", group: dist.ProcessGroup | None = None) -> None:
    """Puts the sum over all ranks, or another reduction, into a tensor.

    Args:
        tensor: of the same shape and dtype on all ranks.
        reduce_operation: "SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR" or "BXOR".
        group: its ranks, in place of all.

    Errors:
        UsageError: no such operation, or no process group. PeerError, TimeoutError: a rank is lost, or does not come.
    """
    name = reduce_operation.upper()
    if name not in _OPERATIONS:
        raise UsageError(f"all_reduce: {reduce_operation!r} is not allowed; expected one of {', '.join(_OPERATIONS)}")
    _together("all_reduce()", dist.all_reduce, tensor, getattr(dist.ReduceOp, name), group)


def broadcast(tensor: Tensor, src: int, group: dist.ProcessGroup | None = None) -> None:
    """Puts what the tensor is on one rank into those of the others.

    Args:
        tensor: of the same shape and dtype on all ranks.
        src: the world rank whose values all get.
        group: its ranks, in place of all.

    Errors:
        UsageError: no process group. PeerError, TimeoutError: a rank is lost, or does not come.
    """
    _together("broadcast()", dist.broadcast, tensor, src, group)
    if (job := current.job_if_any()) is not None:
        job.replicas.share_batches()


def broadcast_object_list(object_list: list[Any], src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Puts the objects of one rank into the lists of the others. They are pickled.

    Args:
        object_list: equally long on all ranks.
        src: the world rank whose objects all get.
        group: its ranks, in place of all.

    Errors:
        UsageError: no process group. PeerError, TimeoutError: a rank is lost, or does not come.
    """
    _together("broadcast_object_list()", dist.broadcast_object_list, object_list, src, group)


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The tensors of all ranks, which have the same shape and dtype, in the order of the ranks."""
    if alone("all_gather()"):
        return [tensor]
    format = torch.contiguous_format
    gathered = [torch.empty_like(tensor, memory_format=format) for _ in range(dist.get_world_size(group))]
    _together("all_gather()", dist.all_gather, gathered, tensor.contiguous(), group)
    return gathered


def all_gather_object(obj: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The objects of all ranks, in the order of the ranks. They are pickled."""
    if alone("all_gather_object()"):
        return [obj]
    gathered = [None] * dist.get_world_size(group)
    _together("all_gather_object()", dist.all_gather_object, gathered, obj, group)
    return gathered


def alone(what: str) -> bool:
    """True where there is nobody to speak to. Raises UsageError where there is somebody, but no process group."""
    if ranks.is_initialized():
        return False
    if (size := ranks.get_world_size()) > 1:
        raise refusal("no-group", what, size, "lamina.dist.initialize_dist()")
    return True


@contextlib.contextmanager
def typed(what: str) -> Iterator[None]:
    """torch's errors of a connection as lamina's; torch's own is the cause."""
    try:
        yield
    except Error:
        raise
    except RuntimeError as error:  # all of torch.distributed's are
        kind = _kind(str(error).lower())
        if kind is None:
            raise
        first = str(error).partition("\n")[0]
        raise kind(f"[rank {ranks.get_global_rank()}/{ranks.get_world_size()}] {what}: {first}") from error


def _together(what: str, collective: Callable, *args: Any) -> None:
    """Calls one of torch's, where there is somebody to speak to."""
    if not alone(what):
        with typed(what):
            collective(*args)


def _kind(text: str) -> type[Error] | None:
    if any(sign in text for sign in ("timed out", "timeout")):
        return TimeoutError
    lost = ("closed by peer", "reset by peer", "connection refused", "broken pipe", "connection was", "remote process")
    return PeerError if any(sign in text for sign in lost) else None
