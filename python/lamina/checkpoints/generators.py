# SPDX-License-Identifier: Apache-2.0
"""The random generators of a rank: torch's, Python's and, where it is in use, NumPy's."""

import random
import sys
from typing import Any

import torch


def states() -> dict[str, Any]:
    """The states of all of them, by name; tensors and plain values."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = numpy.random.get_state(legacy=True)
    return found


def restore(found: dict[str, Any]) -> None:
    """Has them go on from these states; what is not there stays."""
    torch.set_rng_state(found["torch"].cpu())
    if "python" in found:  # a program in C++ has none
        random.setstate(found["python"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"].cpu())
    if "numpy" in found and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(found["numpy"])
