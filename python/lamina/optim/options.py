# SPDX-License-Identifier: Apache-2.0
"""An optimizer's options as a text that ranks compare: see [Note: options] in
lamina/distributed_optimizer/options.h."""

import itertools
import numbers
import weakref
from collections.abc import Callable
from typing import Any

import torch

from lamina import _lamina
from lamina.errors import said
from lamina.job import current

_NO_OPTIONS = {"params", "param_names"}
_PARAMETERS = "the parameters"  # by their ids
# Written by schedulers, for themselves.
_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}


class PlainOptimizers:
    """Optimizers of the model that are no DistributedOptimizer, as plain loops over copies have them: their options are
    to be alike, too.

    Args:
        job: the model's, which is cut.
    """

    def __init__(self, job: current.Job):
        self._job = job
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, Options | None] = weakref.WeakKeyDictionary()

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """A hook before the steps of all optimizers; collective over the ranks that train the model, where it is one of
        its parameters.

        Errors:
            UsageError: its options differ between ranks; a DistributedOptimizer's own step was passed by.
        """
        job = self._job
        if current.in_step():
            return
        if (known := job.state_of(optimizer)) is not None:
            known.require_own_step()
            return
        if optimizer not in self._known:
            mine = set(map(id, job.model.parameters()))
            given = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
            is_model_s = any(id(each) in mine for each in given)
            self._known[optimizer] = Options(optimizer, lambda each: each) if is_model_s else None
            if is_model_s:
                kind = type(optimizer).__name__
                job.fixed_by.append(f"{kind} updates the model, and is no DistributedOptimizer, whose states go along")
        if (options := self._known[optimizer]) is not None:
            text = said("broken-off", options.broken_off) + "\n" + options.text(counts=not job.pipelined)
            _lamina.require_same_options(job.session, text, not is_joining(job))
            options.broken_off += 1

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """A hook after them, which an error leaves out."""
        if (options := self._known.get(optimizer)) is not None:
            options.broken_off -= 1


def is_joining(job: current.Job) -> bool:
    """True within `model.join()`, which copies of the model may have left."""
    return job.replicas.are_joining


class Options:
    """The options of an optimizer, and what one rank alone may have done to it.

    Args:
        optimizer: the optimizer, whose class is compared, too, and how many states were loaded into it.
        parameter_of: finds the parameter of the model for which something stands in its groups.

    Attributes:
        broken_off: how many of its updates an error has ended, for a hook that counts them. This rank may have caught
            that error: then its parameters lack an update that the other ranks made.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameter_of: Callable[[torch.Tensor], torch.Tensor]):
        self.broken_off = 0
        self._optimizer = optimizer
        self._parameter_of = parameter_of
        self._loads = 0
        me = weakref.ref(self)  # the optimizer is not to keep it
        optimizer.register_load_state_dict_post_hook(lambda _: _count_load(me))
        self._class = type(optimizer).__name__  # it may get methods of ours
        self._known: list[dict[str, Any]] = []  # options by group, as they were when `_text` was made
        self._text = ""

    def count_anew(self) -> None:
        """All ranks have been given the same states and parameters."""
        self.broken_off = self._loads = 0

    def text(self, counts: bool) -> str:
        """Returns the text. `counts`: the parameters of the groups are to be alike, too."""
        groups: list[dict[str, Any]] = [
            {key: _fixed(value) for key, value in group.items() if key not in _NO_OPTIONS}
            | ({_PARAMETERS: tuple(map(id, group["params"]))} if counts else {})
            for group in self._optimizer.param_groups
        ]
        groups.append({"states": self._loads})
        if not self._text or groups != self._known:
            self._known, self._text = groups, "\n".join(self._lines(groups))
        return self._text

    def _lines(self, groups: list[dict[str, Any]]) -> list[str]:
        *groups, _ = groups
        known = {id(parameter): name for name, parameter in current.job().model.named_parameters()}
        lines = [f"the class = {self._class}", f"the number of groups = {len(groups)}"]
        for place, group in enumerate(groups):
            for key in sorted(key for key in group if key not in {*_SCHEDULERS, _PARAMETERS}):
                lines.append(f"{key} of group {place} = {_word(group[key])}")
            if _PARAMETERS in group:
                lines.append(f"the number of parameters of group {place} = {len(group[_PARAMETERS])}")
                own = map(self._parameter_of, self._optimizer.param_groups[place]["params"])
                names = [known.get(id(parameter), "none of the model's") for parameter in own]
                lines += [f"parameter {number} of group {place} = {name}" for number, name in enumerate(names)]
        return [*lines, said("loads", self._loads)]


def _count_load(options: "weakref.ReferenceType[Options]") -> None:
    if (found := options()) is not None:
        found._loads += 1


def _fixed(value: Any) -> Any:
    """Copies a value into one that may be compared later: it does not change when the original does."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else str(tuple(value.shape))
    if isinstance(value, list | tuple):
        return tuple(map(_fixed, value))
    return value if value is None or isinstance(value, bool | int | float | str) else _word(value)


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, numbers.Real):
        return f"{float(value):.12g}"  # machines may round the last digits of a schedule differently
    if isinstance(value, tuple):
        return f"({', '.join(map(_word, value))})"
    return type(value).__name__
