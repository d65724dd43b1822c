# SPDX-License-Identifier: Apache-2.0
"""Updates of torch's averages of weights (EMA, SWA)."""

from collections.abc import Callable

from torch import nn
from torch.optim.swa_utils import AveragedModel

Update = Callable[[AveragedModel, nn.Module], None]

_original = AveragedModel.update_parameters


def install(update: Callable[[Update, AveragedModel, nn.Module], None]) -> None:
    """From now on `average.update_parameters(model)` is `update(torch's own, average, model)`."""
    AveragedModel.update_parameters = lambda self, model: update(_original, self, model)


def remove() -> None:
    """Updates are torch's again."""
    AveragedModel.update_parameters = _original
