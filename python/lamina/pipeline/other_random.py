# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are not torch's: of one generator per process, which no stream of a module stands for."""

import random
import sys
import warnings
from typing import Any

from lamina.util.reach import Source

_told = False


def sources() -> list[Source]:
    """Returns these generators without names, for messages: `tell_if_drawn` tells of them."""
    found = [Source("", "random", random.getstate, random.setstate)]
    if "numpy.random" in sys.modules:
        numpys = sys.modules["numpy"].random
        found.append(Source("", "numpy.random", numpys.get_state, numpys.set_state))
    return found


def states() -> list[Any]:
    """States of Python's generator and, where a script uses it, NumPy's."""
    found: list[Any] = [random.getstate()]
    if "numpy.random" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found.append((kind, keys.tobytes(), *rest))
    return found


def tell_if_drawn(before: list[Any]) -> None:
    """Warns, once, where something drew from them in a step since `before`."""
    global _told
    if _told:
        return
    drawn = [name for name, was, now in zip(("random", "numpy.random"), before, states(), strict=False) if was != now]
    if drawn:
        _told = True
        warnings.warn(
            f"a step draws from Python's {' and '.join(drawn)}, of which each rank has its own and microbatches take "
            "turns with it: the numbers are not those of one process. Draw with torch, whose random numbers in a step "
            "do not depend on the layout",
            stacklevel=2,
        )
