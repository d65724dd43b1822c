# SPDX-License-Identifier: Apache-2.0
"""torch.emulated: what torch, and programs, ask of the module of a device type."""

import torch
from torch import Event, Stream
from torch.accelerator import current_device_index as current_device
from torch.accelerator import (
    current_stream,
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
    set_stream,
    synchronize,
)
from torch.accelerator import get_memory_info as mem_get_info

from . import _emulated

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "device",
    "device_count",
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_stream",
    "synchronize",
]

_Device = torch.device | str | int | None
_initialized = True  # asked for by torch.utils.checkpoint


def _index(device: _Device) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return current_device() if index is None or index < 0 else index


def is_available() -> bool:
    return True


def device_count() -> int:
    return _emulated.DEVICES


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False  # operations say it


def _lazy_init() -> None:
    pass


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def get_device_name(device: _Device = None) -> str:
    return "emulated accelerator"


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(_index(device))


class device:  # noqa: N801 (torch.cuda's has this name)
    """Makes a device the current one for as long as it is entered."""

    def __init__(self, device: _Device):
        self.index = _index(device)

    def __enter__(self):
        self.before = current_device()
        set_device(self.index)
        return self

    def __exit__(self, *_):
        set_device(self.before)


def stream(stream: Stream) -> Stream:
    return stream  # one is a context by itself


def _generators() -> list[torch.Generator]:
    return [_emulated.default_generator(index) for index in range(device_count())]


default_generators = tuple(_generators())


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> int:
    return default_generators[current_device()].seed()


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: _Device = "emulated") -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: _Device = "emulated") -> None:
    default_generators[_index(device)].set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, states, strict=True):
        generator.set_state(state)
