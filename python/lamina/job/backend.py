# SPDX-License-Identifier: Apache-2.0
"""The backend "lamina" of torch.distributed: collectives over shared memory, without Python inside.

    torch.distributed.init_process_group("lamina")

Members are processes of one user on one host; elsewhere the group goes over Gloo, which is said once. It is for tensors
of the CPU: `init_process_group("cpu:lamina,cuda:nccl")` leaves those of CUDA to NCCL.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lamina import _lamina

NAME = "lamina"

_making: tuple[_lamina.Session, float] | None = None  # whose groups are being made, and by when


@contextmanager
def made_for(job: _lamina.Session, within_s: float) -> Iterator[None]:
    """Groups that are made inside are the job's: all of them within this time, and they hear of lost ranks."""
    global _making
    _making = job, time.monotonic() + within_s
    try:
        yield
    finally:
        _making = None


def _make(options, _own_options) -> dist.Backend:
    members = options.global_ranks_in_group or range(options.group_size)
    job, by = _making or (None, 0.0)
    return _lamina.make_backend(
        options.store,
        options.group_rank,
        list(members),
        options.timeout.total_seconds(),
        job,
        max(by - time.monotonic(), 0.0),
    )


dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
