# SPDX-License-Identifier: Apache-2.0
"""Types for annotations."""

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler as PyTorchScheduler
from torch.utils.data import Dataset

from composer.paths import others

__getattr__ = others(__name__)

Batch = Any
JSON = str | float | int | None | list["JSON"] | Mapping[str, "JSON"]

__all__ = ["JSON", "Batch", "Dataset", "PyTorchScheduler"]
