# SPDX-License-Identifier: Apache-2.0
"""Changes that a step body makes to the modules of a model before they are cut: until its first call of the model.

The rank that leads runs the body; all ranks of its pipeline have noted beforehand what the modules can reach, so that
its changes can be made on the others as well. What cannot be brought there is an error on all of them: other parameters
or modules, and hooks, unless they stay on the rank that leads.
"""

from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from lamina import _lamina
from lamina.errors import UsageError
from lamina.libraries import hugging_face
from lamina.script_state.changes import Changes, Difference, Snapshot, differences
from lamina.script_state.holders import Attributes
from lamina.script_state.names import HOOKS
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
        kept = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}  # whose values the cut brings
        roots = ((path, module) for path, module in self._modules.values())
        self._before = Snapshot(Reach(roots, lambda value: id(value) not in kept))
        self._hooked: list[tuple[str, nn.Module]] = []
        self._set: list[tuple[nn.Module, str, Any]] = []

    def bring(self, session: _lamina.Session) -> None:
        """Makes the changes of the rank that leads on all ranks of its pipeline, which call this.

        Errors:
            UsageError: on all of them, what cannot be brought there.
        """
        changes, refused = None, None
        if session.leads:
            try:
                changes = self._changes()
            except _CannotTravelError as error:
                refused = error.args
        changes, refused = session.all_gather("one_copy", (changes and list(changes), refused))[0]
        if refused:
            raise _refused(*refused)
        if any(changes):
            missing: list[str] = []
            if not session.leads:
                self._before.apply(Changes(*changes), lambda name, _: missing.append(name), replaces=True)
            for each in session.all_gather("one_copy", missing[:1]):
                if each:
                    raise _refused(each[0], ", one of which does not have it")

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

    def _changes(self) -> Changes:
        if (now := _kinds(self._root)).keys() != self._tensors.keys():
            raise _CannotTravelError(min(now.keys() ^ self._tensors.keys()))
        for name, kind in now.items():
            if kind != self._tensors[name]:
                raise _CannotTravelError(f"the type, shape or device of {name}")
        return self._before.changes(list(filter(self._is_brought, differences(self._before.reach))), self._refuse)

    def _is_brought(self, difference: Difference) -> bool:
        path, module, kind = self._kept.get(id(difference.holder.held), ("", None, ""))
        if kind in ("_parameters", "_modules"):
            raise _CannotTravelError(f"{path}.{next(iter([*difference.set, *difference.gone]))}")
        if kind in HOOKS:
            theirs = all(map(hugging_face.is_collector, difference.set.values()))
            self._hooked += [] if theirs else [(path, module)]
        elif (owner := self._owner(difference)) is not None:
            self._set += [(owner, name, value) for name, value in difference.set.items() if name != "training"]
        return not kind

    def _owner(self, difference: Difference) -> nn.Module | None:
        """The module whose attributes have changed; None for what is in them."""
        is_attribute = type(difference.holder) is Attributes
        return self._modules.get(id(difference.holder.held), ("", None))[1] if is_attribute else None

    def _refuse(self, part: Difference, error: Exception) -> None:
        if self._owner(part) is not None:  # for anything else others may have no use
            raise _CannotTravelError(part.first(), f" ({type(error).__name__}: {error})") from error


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
