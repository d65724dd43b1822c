# SPDX-License-Identifier: Apache-2.0
"""torch's averages of weights (EMA, SWA) over a model that is cut, or sharded.

`AveragedModel(module)`, made before the first step, holds a whole copy. Updated from the model once that is cut, it
averages what this rank owns, and lets go of the rest: other ranks have the averages of that. Of sharded parameters each
rank averages whole values, which come for the update.
"""

from collections.abc import Callable

from torch import nn
from torch.optim.swa_utils import AveragedModel

from lamina.job import current
from lamina.model import shards
from lamina.model.partitioned import PartitionedModel, named_tensors
from lamina.model.places import only_own, without


def update(original: Callable[[AveragedModel, nn.Module], None], average: AveragedModel, model: nn.Module) -> None:
    """Updates an average by `original`, torch's own function; for the job's model only this rank's part of it."""
    job = current.job()
    if job.life.whole or model not in (job.model, job.model.module):
        return original(average, model)
    cut = job.partitioned_model
    _let_go(average.module, cut)
    held = dict(named_tensors(average.module))
    foreign = [held[name] for name, _, owner in cut.tensors() if owner != cut.partition]
    with only_own(cut), without(average.module, foreign), shards.gathered_parameters(model.parameters()):
        original(average, model)


def _let_go(averaged: nn.Module, model: PartitionedModel) -> None:
    """Averages that other ranks keep would have an old value here."""
    held = dict(named_tensors(averaged))
    for name, _, owner in model.tensors():
        if owner != model.partition:
            current.session().release(held[name], f"the average of {name}", owner)
