# SPDX-License-Identifier: Apache-2.0
"""Horovod's names, over the copies of the model that the job has."""

from collections.abc import Sequence
from typing import Any

from lamina.errors import UsageError
from lamina.job.ranks import dp_size


def _of_one_copy(what: str) -> None:
    if dp_size() > 1:
        raise UsageError(f"{what} over {dp_size()} copies of the model is not there yet")


def allreduce(tensor: Any, *_: Any, **__: Any) -> Any:
    """The mean of a tensor over the copies of the model; of one copy, the tensor."""
    _of_one_copy("hvd.allreduce()")
    return tensor


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Gives the variables of all copies of the model the values of one; of one copy, nothing changes."""
    _of_one_copy("hvd.broadcast_variables()")
    if root_rank != 0:
        raise UsageError(f"hvd.broadcast_variables(): there is no copy {root_rank} of the model, only copy 0")
