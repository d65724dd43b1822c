# SPDX-License-Identifier: Apache-2.0
"""Changes that a step body makes to the modules of a model before they are cut: until its first call of the model.

The rank that leads runs the body; all ranks of its pipeline have noted beforehand what the modules can reach, so that
its changes can be made on the others as well. What cannot be brought there is an error on all of them: other parameters
or modules, and hooks, unless they stay on the rank that leads.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from lamina import _lamina
from lamina.errors import UsageError
from lamina.libraries import hugging_face
from lamina.script_state.differences import Difference, Places, differences
from lamina.script_state.holders import Attributes
from lamina.script_state.names import HOOKS
from lamina.script_state.tokens import version_of
from lamina.script_state.walk import Reach

_OF_TORCH = ("_parameters", "_buffers", "_modules", *HOOKS)


class BeforeCut:
    """The modules of a model as they were when its first step began.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module):
        self._modules = {id(module): (path or "the model", module) for path, module in root.named_modules()}
        self._kept = {
            id(vars(module)[kind]): (path, module, kind)
            for path, module in self._modules.values()
            for kind in _OF_TORCH
            if kind in vars(module)  # a ScriptModule has them elsewhere
        }
        self._tensors = _kinds(root)
        self._root = root
        self._reach = Reach((path, module) for path, module in self._modules.values())
        kept = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
        tensors = enumerate(self._reach.tensors)
        self._plain = {place: version_of(tensor) for place, tensor in tensors if id(tensor) not in kept}
        self._hooked: list[tuple[str, nn.Module]] = []
        self._set: list[tuple[nn.Module, str, Any]] = []

    def bring(self, session: _lamina.Session) -> None:
        """Makes the changes of the rank that leads on all ranks of its pipeline, which call this.

        Errors:
            UsageError: on all of them, what cannot be brought there.
        """
        leads = session.leads
        changes = _Changes()
        if leads:
            try:
                changes = self._changes()
            except _CannotTravelError as error:
                changes = _Changes(refused=error.args)
        changes = session.all_gather("one_copy", changes if leads else None)[0]
        if changes.refused:
            raise _refused(*changes.refused)
        if changes.packed or changes.written:
            missing = "" if leads else self._apply(changes)
            if missing := next(filter(None, session.all_gather("one_copy", missing)), ""):
                raise _refused(missing, ", one of which does not have it")

    def finish(self, elsewhere: Any, in_turns: bool) -> None:
        """Once it is known who owns what: hooks are to be hung where their module runs, and for one microbatch.

        Errors:
            UsageError: they are not. On the rank that leads.
        """
        for path, module in self._hooked:
            if in_turns or elsewhere(module) is not None:
                raise _refused(f"a hook of {path}")

    def keep_as_own(self) -> None:
        """In the body, once its model is cut: attributes that it has set are its microbatch's own."""
        for module, name, value in self._set:
            if vars(module).get(name) is value:
                setattr(module, name, value)

    def _changes(self) -> "_Changes":
        if (now := _kinds(self._root)).keys() != self._tensors.keys():
            raise _CannotTravelError(min(now.keys() ^ self._tensors.keys()))
        for name, kind in now.items():
            if kind != self._tensors[name]:
                raise _CannotTravelError(f"the type, shape or device of {name}")
        changes, places = _Changes(), Places(self._reach)
        for each in differences(self._reach):
            path, module, kind = self._kept.get(id(each.holder.held), ("", None, ""))
            if kind in ("_parameters", "_modules"):
                raise _CannotTravelError(f"{path}.{next(iter([*each.set, *each.gone]))}")
            if kind in HOOKS:
                theirs = all(map(hugging_face.is_collector, each.set.values()))
                self._hooked += [] if theirs else [(path, module)]
            elif kind != "_buffers":  # whose values the cut brings
                changes.packed += self._packed(places, each)
        for place, version in self._plain.items():
            if version_of(self._reach.tensors[place]) != version:
                changes.written[place] = self._reach.tensors[place].detach()
        return changes

    def _packed(self, places: Places, difference: Difference) -> list[bytes]:
        module = self._modules.get(id(difference.holder.held)) if type(difference.holder) is Attributes else None
        if module is not None:
            self._set += [(module[1], name, value) for name, value in difference.set.items() if name != "training"]
        try:
            return [places.pack(difference)]
        except Exception as error:
            if module is None:  # others may have no use for it
                return []
            raise _CannotTravelError(difference.first(), f" ({type(error).__name__}: {error})") from error

    def _apply(self, changes: "_Changes") -> str:
        """Returns the name of a thing that is not here, if any."""
        places = Places(self._reach)
        for place, value in changes.written.items():
            if place not in self._plain or self._reach.tensors[place].shape != value.shape:
                return "a tensor in an attribute"
            with torch.no_grad():
                self._reach.tensors[place].copy_(value)
        return next(filter(None, map(places.apply, changes.packed)), "")


@dataclass
class _Changes:
    packed: list[bytes] = field(default_factory=list)
    written: dict[int, torch.Tensor] = field(default_factory=dict)  # plain tensors, by their place in the walk
    refused: tuple[str, ...] = ()


class _CannotTravelError(Exception):
    """A change that stays on one rank: its name, and why."""


def _kinds(root: nn.Module) -> dict[str, tuple]:
    tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    return {
        name: (type(each),)
        if isinstance(each, UninitializedTensorMixin)
        else (type(each), each.dtype, each.shape, each.device, each.layout)
        for name, each in tensors
    }


def _refused(what: str, why: str = "") -> UsageError:
    return UsageError(
        f"{what} was changed in a step's body before its first call of the model, in the step in which the model is "
        f"cut, and cannot be brought to the other ranks{why}: change it before the step function, on every rank",
        code="step-before-cut",
    )
