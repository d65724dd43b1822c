# SPDX-License-Identifier: Apache-2.0
"""The first rank of a job that is planned for, without the others."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn

from lamina import _lamina
from lamina.deferred_init import delayed
from lamina.layers import hugging_face
from lamina.tensor_parallel import replacing, slicing
from lamina.tensor_parallel.layers import Slicing
from lamina.tensor_parallel.shares import share

_CHOSEN = "chosen"  # the engine's word


class FirstRank:
    """Answers what the cut of a model's layers asks a session.

    Args:
        degree: over how many ranks layers are cut.
        partitions: of the job.
        one_batch: whether these ranks read one batch (`prescaled_batch`).
        optimize: the key of that name.
    """

    rank = 0

    def __init__(self, degree: int = 1, partitions: int = 1, one_batch: bool = False, optimize: str = "memory"):
        copies = 1 if one_batch else degree
        self.config = SimpleNamespace(optimize=optimize)
        self._sizes = {"tp": degree, "partitions": partitions, "replicas": copies, "same_parts": 1}
        self._team = _lamina.LoneTeam(degree)

    def group_size(self, group: str) -> int:
        return self._sizes[group]

    def group_rank(self, group: str) -> int:
        return 0

    def team(self) -> str:
        return self._team.name

    def slice(
        self, parameters: list[tuple[str, nn.Parameter, Slicing]], make: Callable[[list[torch.Tensor]], None]
    ) -> None:
        """Leaves parameters as much as this rank's slices have, with any values."""
        degree = self.group_size("tp")
        for _, parameter, (dimension, sections) in parameters:
            own = sum(unit * share(extent // unit, degree, 0).own for extent, unit in sections)
            parameter.data = parameter.data.narrow(dimension, 0, own).clone()


def as_wrapped(model: nn.Module, rank: FirstRank) -> tuple[nn.Module, list[list[str]]]:
    """The model as `DistributedModel` makes it for this rank, in place, and the layers that are cut, with their styles.

    Errors:
        UsageError: a plan does not fit the model.
    """
    model = replacing.replace(model, rank, hugging_face.registration_of, delayed.cut).root
    if rank.group_size("tp") == 1:
        return model, []
    cuts = slicing.cut_layers(model, rank, delayed.initialise)
    slicing.let_batches_take_turns(model, rank)
    return model, [[name, "colwise, of a whole" if cut.style == _CHOSEN else cut.style] for name, cut in cuts.items()]
