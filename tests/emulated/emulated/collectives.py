# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed for the emulated devices."""

import torch.distributed as dist

from . import _emulated

NAME = "emulatedccl"


def _make(options, _backend_options):
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    return _emulated.make_backend(gloo)


def register() -> None:
    dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["emulated"])
