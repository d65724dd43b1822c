# SPDX-License-Identifier: Apache-2.0
"""An accelerator that is not there, for tests: torch's device "emulated" (tests/emulated/emulated.h says what it is).

Importing it makes the devices known to torch, with `torch.emulated`, and "emulatedccl" to torch.distributed. Programs
whose PYTHONPATH has the folder where it lies import it with torch.
"""

import sys

import torch

from . import _emulated, collectives, device_module
from ._emulated import reset_counts

__all__ = ["counts", "reset_counts"]


def counts() -> dict:
    """By host and devices: `enqueued` and `drained` operations, `waits` of host threads for a device, `bytes` and
    `peak_bytes` by device, the devices that have `contexts`, and `drains`, the drained operations by name."""
    return _emulated.counts()


torch.utils.rename_privateuse1_backend("emulated")
torch._register_device_module("emulated", device_module)
sys.modules["torch.emulated"] = device_module
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
collectives.register()
