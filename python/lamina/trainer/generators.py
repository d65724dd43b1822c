# SPDX-License-Identifier: Apache-2.0
"""The random generators of this process: torch's on the host, Python's and NumPy's."""

import random
import sys
from typing import Any

import torch


def generators() -> dict[str, Any]:
    """Their states, as plain containers."""
    version, numbers, gauss = random.getstate()
    found = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    numpy = sys.modules.get("numpy")
    return found if numpy is None else found | {"numpy": list(numpy.random.get_state())}


def set_generators(states: dict[str, Any]) -> None:
    """Puts them into these states."""
    version, numbers, gauss = states["python"]
    torch.set_rng_state(states["torch"])
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(tuple(states["numpy"]))
