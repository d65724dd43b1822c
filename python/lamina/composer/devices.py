# SPDX-License-Identifier: Apache-2.0
"""Devices as scripts name them: where a training runs."""

from typing import Any

import torch
from torch.utils._pytree import tree_map

from lamina.errors import ConfigError


class Device:
    """Moves what a training has to where it runs.

    Attributes:
        name: as the Trainer's `device` names it.
        dist_backend: of torch's process groups there.
    """

    name = dist_backend = ""

    def module_to_device(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module, with its parameters and buffers there."""
        return module.to(self.name)

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy of it there."""
        return tensor.to(self.name)

    def optimizer_to_device(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer, with the tensors of its states there."""
        for state in optimizer.state.values():
            state.update(self.batch_to_device(dict(state)))
        return optimizer

    def batch_to_device(self, batch: Any) -> Any:
        """A batch whose tensors are there."""
        return tree_map(lambda part: self.tensor_to_device(part) if isinstance(part, torch.Tensor) else part, batch)


class DeviceCPU(Device):
    """The host."""

    name, dist_backend = "cpu", "gloo"


def get_device(device: Any) -> Device:
    """The device of a name; one as it is; without any the host.

    Errors:
        ConfigError: another name, or one where no training runs yet.
    """
    if isinstance(device, Device):
        return device
    name = device if isinstance(device, str) else None
    if device is None or name == "cpu":
        return DeviceCPU()
    if name in ("gpu", "cuda"):
        raise ConfigError(f"device={device!r} is not there yet: trainings run on CPUs")
    raise ConfigError(f"device={device!r}: it is 'cpu' or 'gpu'")
