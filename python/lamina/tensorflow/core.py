# SPDX-License-Identifier: Apache-2.0
"""Names that scripts reach as `smp.core`: ranks, groups and messages between them."""

from lamina.job.messages import allgather, barrier, broadcast, dp_barrier, mp_barrier, recv_from, send
from lamina.job.ranks import (
    dp_rank,
    dp_size,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    num_microbatches,
    pp_rank,
    pp_size,
    rank,
    size,
)

__all__ = [
    "allgather",
    "barrier",
    "broadcast",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "num_microbatches",
    "pp_rank",
    "pp_size",
    "rank",
    "recv_from",
    "send",
    "size",
]
