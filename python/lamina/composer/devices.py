# SPDX-License-Identifier: Apache-2.0
"""Devices as scripts name them: where a training runs."""

from typing import Any

import torch
import torch.distributed as dist

from lamina import _lamina
from lamina.errors import ConfigError
from lamina.job import current, ranks
from lamina.optim.placing import move_states
from lamina.trainer.moves import moved


class Device:
    """Moves what a training has to where it runs.

    Args:
        key: the device, as `lamina.init` takes it.

    Attributes:
        name: "cpu", or "gpu" for an accelerator, whatever its type.
    """

    name = "cpu"

    def __init__(self, key: str):
        self.key = key

    @property
    def there(self) -> torch.device:
        """The device of torch's: the one that the rank computes on, in a job that is on it."""
        chosen = _lamina.chosen_device(self.key)
        own = ranks.device()
        return own if current.is_initialized() and own.type == chosen.type else chosen

    @property
    def dist_backend(self) -> str:
        """The backend of torch's process groups there."""
        return dist.get_default_backend_for_device(self.there)

    def module_to_device(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module, with its parameters and buffers there."""
        return module.to(self.there)

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy of it there, for which the host does not wait."""
        return moved(tensor, self.there)

    def batch_to_device(self, batch: Any) -> Any:
        """The batch, with its tensors there; see `tensor_to_device`."""
        return moved(batch, self.there)

    def optimizer_to_device(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer, with the tensors of its states there; counts of steps stay on the host for those of torch's
        optimizers that read them there."""
        move_states(optimizer, lambda _: self.there)
        return optimizer


class DeviceCPU(Device):
    """The host."""

    def __init__(self) -> None:
        super().__init__("cpu")


class DeviceGPU(Device):
    """An accelerator, whatever its type.

    Args:
        device_id: its number on this machine; None: the rank's own.

    Errors:
        ConfigError: there is none, or none of that number.
    """

    name = "gpu"

    def __init__(self, device_id: int | None = None):
        found = _lamina.chosen_device("gpu")
        super().__init__("gpu" if device_id is None else f"{found.type}:{device_id}")
        _lamina.chosen_device(self.key)


def get_device(device: Any) -> Device:
    """The device of a name, "gpu" for an accelerator of any type, or of a torch.device; one as it is. Without any the
    accelerator, if there is one, else the host. LAMINA_DEVICE is above all of them.

    Errors:
        ConfigError: something else, or a device that is not here.
    """
    if isinstance(device, Device):
        return device
    if device is not None and not isinstance(device, (str, torch.device)):
        raise ConfigError(f"device={device!r}: it is 'cpu', 'gpu' or a torch.device")
    key = "auto" if device is None else str(device)
    found = DeviceCPU() if _lamina.chosen_device(key).type == "cpu" else DeviceGPU()
    found.key = key
    return found
