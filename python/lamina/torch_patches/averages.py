# SPDX-License-Identifier: Apache-2.0
"""Updates of torch's averages of weights (EMA, SWA)."""

from collections.abc import Callable
from contextlib import ExitStack

from torch import nn
from torch.optim.swa_utils import AveragedModel

from lamina.util.settings import replace

Update = Callable[[AveragedModel, nn.Module], None]


def install(update: Callable[[Update, AveragedModel, nn.Module], None], undo: ExitStack) -> None:
    """Until `undo` is closed, `average.update_parameters(model)` is `update(torch's own, average, model)`."""
    original = AveragedModel.update_parameters
    replace(undo, AveragedModel, "update_parameters", lambda self, model: update(original, self, model))
