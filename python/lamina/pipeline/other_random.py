# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are not torch's: of one generator per process, which no stream of a module stands for."""

import dataclasses
import pickle
import warnings

from lamina.script_state.generators import Source, not_of_torch

_NAMES = {"python": "random", "numpy": "numpy.random"}
_told = False


def sources() -> list[Source]:
    """Returns these generators without names, for messages: `tell_if_drawn` tells of them."""
    return [dataclasses.replace(each, name="") for each in not_of_torch()]


def states() -> list[bytes]:
    """Their states, to compare them."""
    return [pickle.dumps(each.get()) for each in sources()]


def tell_if_drawn(before: list[bytes]) -> None:
    """Warns, once, where something drew from them in a step since `before`."""
    global _told
    if _told:
        return
    drawn = [name for name, was, now in zip(_NAMES.values(), before, states(), strict=False) if was != now]
    if drawn:
        _told = True
        warnings.warn(
            f"a step draws from Python's {' and '.join(drawn)}, of which each rank has its own and microbatches take "
            "turns with it: the numbers are not those of one process. Draw with torch, whose random numbers in a step "
            "do not depend on the layout",
            stacklevel=2,
        )
