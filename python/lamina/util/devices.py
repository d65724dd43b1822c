# SPDX-License-Identifier: Apache-2.0
"""Devices in what is pickled for another rank."""

from typing import Any

import torch

from lamina import _lamina


def reduced(value: Any) -> Any:
    """Gives what `reducer_override` of a pickler does for a value: the device of this rank is that of the one that
    unpickles it, see [Note: roles] in lamina/device/role.h."""
    if isinstance(value, torch.device) and value.type != "cpu" and value == _lamina.rank_device():
        return _own, ()
    return NotImplemented


def _own() -> torch.device:
    return _lamina.rank_device()
