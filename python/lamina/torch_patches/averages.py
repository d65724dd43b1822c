# SPDX-License-Identifier: Apache-2.0
"""torch's averages of weights (EMA, SWA) over a model that is cut.

`AveragedModel(module)`, made before the first step, holds a whole copy. Updated from the model once that is cut, it
averages what this rank owns, and lets go of the rest: other ranks have the averages of that.
"""

from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from lamina.job import current
from lamina.model.partitioned import PartitionedModel, only_own, without

_original = AveragedModel.update_parameters
_module: list[nn.Module] = []  # one at most


def install(module: nn.Module) -> None:
    """From now on averages of this model, which is cut, are averages of this rank's part."""
    _module[:] = [module]
    AveragedModel.update_parameters = _update


def remove() -> None:
    """Averages are torch's again."""
    _module.clear()
    AveragedModel.update_parameters = _original


def _update(self: AveragedModel, model: nn.Module) -> None:
    cut = current.job().cut
    if cut.whole or model not in (_module[0], current.job().model):
        return _original(self, model)
    _let_go(self.module, cut.model)
    held = dict(_named(self.module))
    foreign = [held[name] for name, _, owner in cut.model.tensors() if owner != cut.model.partition]
    with only_own(cut.model), without(self.module, foreign):
        _original(self, model)


def _let_go(averaged: nn.Module, model: PartitionedModel) -> None:
    """Of averages that other ranks keep, the value here would be an old one."""
    held = dict(_named(averaged))
    for name, _, owner in model.tensors():
        if owner != model.partition:
            current.session().release(held[name], f"the average of {name}", owner)


def _named(module: nn.Module) -> Any:
    yield from module.named_parameters()
    yield from module.named_buffers()
