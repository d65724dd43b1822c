# SPDX-License-Identifier: Apache-2.0
"""Optimizers that need all of a parameter, where ranks have parts: see [Note: owners] in
lamina/distributed_optimizer/owners.h."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lamina import _lamina
from lamina.job import current


class WholeParameters:
    """The groups and states of such an optimizer: wholes in its steps, parts between them.

    Args:
        optimizer: whose groups have parts.
        steps: knows who owns which parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: _lamina.OptimizerSteps):
        self._optimizer = optimizer
        self._steps = steps
        self._put_aside: list[list[torch.Tensor]] = []  # what the groups have outside of a step
        self._wholes: list[tuple[torch.Tensor, torch.Tensor]] = []  # with their parts

    def begin(self) -> None:
        """Makes parameters that have gradients whole, on their owners, in the groups; collective over the holders."""
        groups = [list(group["params"]) for group in self._optimizer.param_groups]
        in_step = iter(self._steps.begin_wholes([place for group in groups for place in group]))
        self._put_aside = groups
        for group, places in zip(self._optimizer.param_groups, groups, strict=True):
            updated = [(place, next(in_step)) for place in places]
            self._wholes += [(place, own) for place, own in updated if own is not None and own is not place]
            group["params"][:] = [own for _, own in updated if own is not None]
        for place, whole in self._wholes:
            _move(self._optimizer.state, place, whole)

    def end(self) -> None:
        """Gives all holders their parts of what the owners have updated; collective over them."""
        self._steps.end_wholes()
        self.restore()

    def restore(self) -> None:
        """Puts the parts back into the groups, also after a step that failed."""
        for group, places in zip(self._optimizer.param_groups, self._put_aside, strict=False):
            group["params"][:] = places
        for place, whole in self._wholes:
            _move(self._optimizer.state, whole, place)
        self._put_aside, self._wholes = [], []
        self._steps.forget_wholes()

    def gathered(self, state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """States by name with those that other ranks have of these parameters; collective over the holders."""
        own = {name: state[name] for name in names if name in state}
        whole = dict(state)
        for part in current.session().all_gather(self._steps.divided_over, own):
            whole |= part
        return whole


def _move(state: dict[torch.Tensor, Any], before: torch.Tensor, after: torch.Tensor) -> None:
    if before in state:
        state[after] = state.pop(before)
