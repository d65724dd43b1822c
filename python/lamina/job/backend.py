# SPDX-License-Identifier: Apache-2.0
"""The backend "lamina" of torch.distributed: collectives over shared memory, without Python inside.

    torch.distributed.init_process_group("lamina")

Members are processes of one user on one host; elsewhere the group goes over Gloo, which is said once. It is for tensors
of the CPU: `init_process_group("cpu:lamina,cuda:nccl")` leaves those of CUDA to NCCL.
"""

import torch.distributed as dist

from lamina import _lamina

NAME = "lamina"


def _make(options, _own_options) -> dist.Backend:
    members = options.global_ranks_in_group or range(options.group_size)
    return _lamina.make_backend(options.store, options.group_rank, list(members), options.timeout.total_seconds())


dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
