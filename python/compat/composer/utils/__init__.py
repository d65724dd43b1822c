# SPDX-License-Identifier: Apache-2.0
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from composer.paths import offer, others
from composer.utils import dist as dist
from composer.utils import reproducibility as reproducibility
from lamina.composer.devices import get_device as get_device

__getattr__ = others(__name__)


def ensure_tuple(x: Any) -> tuple[Any, ...]:
    """The items of a sequence, the values of a mapping, nothing for None; else one."""
    if x is None:
        return ()
    if isinstance(x, Mapping):
        return tuple(x.values())
    is_several = isinstance(x, Sequence) and not isinstance(x, (str, bytes, bytearray))
    return tuple(x) if is_several else (x,)


offer(__name__, iter_helpers=sys.modules[__name__])
