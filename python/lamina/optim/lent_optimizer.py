# SPDX-License-Identifier: Apache-2.0
"""An optimizer of torch's as the engine sees it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from lamina import _lamina
from lamina.job import current
from lamina.model.partitioned import packed, unpacked
from lamina.optim.functional import FunctionalOptimizer
from lamina.optim.options import Options
from lamina.optim.registry import needs_of
from lamina.optim.states import States

Moved = Sequence[tuple[torch.Tensor, torch.Tensor | None]]


class LentOptimizer:
    """Has the methods that lamina/distributed_optimizer/user_optimizer.h asks for.

    Args:
        optimizer: the optimizer, with its class's methods.
        parameter_of: finds the parameter of the model for which something stands in the groups.
        part: makes a state of a place out of one of the whole parameter; see States.

    Attributes:
        loss: in a step, what its closure has returned.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameter_of: Callable[[torch.Tensor], torch.Tensor],
        part: Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], Any],
    ):
        self._optimizer = optimizer
        self._class = type(optimizer)
        self._step = optimizer.step  # which a scheduler may have wrapped
        self._options = Options(optimizer, parameter_of)
        self._part = part
        self._places: dict[int, torch.Tensor | None] = {}  # as States has them, of parameters that `_given` keeps
        self._given: list[torch.Tensor] = []
        self.loss: Any = None

    def forget_places(self) -> None:
        """Nothing stands for parameters any more: they are in the groups themselves."""
        self._places, self._given = {}, []

    def members(self) -> list[torch.Tensor]:
        """Lists all that the groups have."""
        return [member for group in self._optimizer.param_groups for member in group["params"]]

    def named_parameters(self) -> list[tuple[torch.Tensor, str]]:
        """Lists the parameters of the job's model, with their names."""
        return [(parameter, name) for name, parameter in current.job().model.named_parameters()]

    def groups(self) -> list[list[tuple[torch.Tensor, str]]]:
        """Lists it by group, with the name that each was given with, "" for none."""
        return [
            list(zip(group["params"], group.get("param_names", [""] * len(group["params"])), strict=True))
            for group in self._optimizer.param_groups
        ]

    def trim(self, groups: Sequence[Sequence[tuple[torch.Tensor, str]]], moved: Moved) -> None:
        """Replaces members of groups for good, in place. A member that takes another's place gets its state."""
        for group, members in zip(self._optimizer.param_groups, groups, strict=True):
            group["params"][:] = [member for member, _ in members]
            if "param_names" in group:
                group["param_names"] = [name for _, name in members]
        self._move_states(moved)
        self._given += [parameter for parameter, _ in moved]
        self._places |= {id(parameter): place for parameter, place in moved}
        self.see_to_states()

    def exchange(self, groups: Sequence[Sequence[torch.Tensor]], moved: Moved) -> None:
        """Does so for an update, or afterwards."""
        for group, members in zip(self._optimizer.param_groups, groups, strict=True):
            group["params"][:] = members
        self._move_states(moved)

    def state_of(self, member: torch.Tensor) -> dict[str, Any] | None:
        """The state of a member; None where it has none."""
        state = dict.get(self._optimizer.state, member)
        return None if state is None else {name: packed(field) for name, field in state.items()}

    def set_state(self, member: torch.Tensor, state: dict[str, Any] | None) -> None:
        """Gives it another one."""
        dict.pop(self._optimizer.state, member, None)
        if state:
            dict.__setitem__(self._optimizer.state, member, {name: unpacked(field) for name, field in state.items()})

    def options(self, counts: bool) -> str:
        """The class and the options, as ranks compare them. `counts`: how many members groups have is one."""
        return self._options.text(counts)

    def count_anew(self) -> None:
        """As Options.count_anew."""
        self._options.count_anew()

    def needs(self) -> str:
        """Says what the optimizer needs of a parameter."""
        return needs_of(self._class) or "elements"

    def needs_norm(self) -> bool:
        """True where an update needs the norm of all gradients."""
        return isinstance(self._optimizer, FunctionalOptimizer) and self._optimizer._form().norm

    def takes_any_gradient(self) -> bool:
        """True where the engine updates the members of the groups."""
        is_ours = isinstance(self._optimizer, FunctionalOptimizer) and self._optimizer.is_fused()
        return is_ours and self.needs() != "whole"

    def update(self, terms: _lamina.UpdateTerms) -> None:
        """Has the optimizer make its own step."""
        if terms.has_closure:
            self.loss = self._step(lambda: (terms.close(), self.loss)[1])
            return
        is_ours = terms.parameters is not None and isinstance(self._optimizer, FunctionalOptimizer)
        around = self._optimizer.around(terms) if is_ours else nullcontext()
        with around, _lamina.Unguarded():  # of what it needs the engine has all
            self._step()

    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets the gradients of the members, or makes them zero."""
        self._class.zero_grad(self._optimizer, set_to_none)

    def step_alone(self, closure: Callable[[], Any] | None) -> Any:
        """Makes a step without the engine."""
        return self._step() if closure is None else self._step(closure)

    def see_to_states(self) -> None:
        """Has states found by parameters again: torch makes a new dictionary of them when it loads some."""
        if self._places and not isinstance(self._optimizer.state, States):
            self._optimizer.state = States(self._optimizer.state, self._places, self._part)

    def _move_states(self, moved: Moved) -> None:
        states = self._optimizer.state
        for before, after in moved:
            state = dict.pop(states, before, None)
            if state is not None and after is not None:
                dict.__setitem__(states, after, state)
