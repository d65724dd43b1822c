# SPDX-License-Identifier: Apache-2.0
"""Optimizers over parameters that are whole here, and whose gradients come from elsewhere."""

import contextlib
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn, optim

from lamina.errors import UsageError
from lamina.optim.engine_optimizer import EngineOptimizer, require_as_many, step_eagerly
from lamina.optim.registry import functional_forms


class LocalOptimizer(Protocol):
    """One that `local_optimizer` makes. Threads that call `step` take turns."""

    @property
    def state(self) -> Any:
        """The states by parameter."""

    def step(self, gradients: Sequence[torch.Tensor | None], options: Mapping[str, Any] | None = None) -> None:
        """One update, with a gradient or None for each parameter; ValueError for more or fewer. `options`:
        hyper-parameters of this step alone, in the place of those that it was made with."""


def local_optimizer(
    optimizer_class: type[optim.Optimizer], parameters: Iterable[torch.Tensor], *args: Any, **kwargs: Any
) -> LocalOptimizer:
    """Makes the functional form of an optimizer, or the optimizer itself where it has none, which holds the GIL in its
    updates; a warning says so, once for each class.

    Errors:
        UsageError: LBFGS, which computes the loss again in its step; what is not a class of optimizers.
        ValueError: what the optimizer says of its arguments.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, optim.Optimizer)):
        raise UsageError(f"{optimizer_class!r} is not a class of torch.optim.Optimizer")
    if issubclass(optimizer_class, optim.LBFGS):
        raise UsageError(
            "LBFGS computes the loss again and again in one step, and has only the gradients of one: take an optimizer "
            "that updates once"
        )
    parameters = list(parameters)
    form = functional_forms().get(optimizer_class)
    if form is None:
        _say_once(optimizer_class, "has no functional form; lamina.optim.register_functional_optimizer gives it one")
        return EagerOptimizer(optimizer_class, parameters, *args, **kwargs)
    made = form(parameters, *args, **kwargs)
    if isinstance(made, EngineOptimizer):
        return made
    compiled = CompiledOptimizer(made, parameters)
    if compiled.module is None:
        name = type(made).__name__
        _say_once(optimizer_class, f"has the functional form {name}, which torch.jit.script({name}) does not compile")
    return compiled


class EagerOptimizer:
    """An optimizer as it is."""

    def __init__(self, kind: type[optim.Optimizer], parameters: list[torch.Tensor], *args: Any, **kwargs: Any):
        self.optimizer = kind(parameters, *args, **kwargs)
        self._parameters = parameters

    @property
    def state(self) -> Any:
        """The states by parameter."""
        return self.optimizer.state

    def step(self, gradients: Sequence[torch.Tensor | None], options: Mapping[str, Any] | None = None) -> None:
        """One update, in turns with those of all others."""
        require_as_many(self._parameters, gradients)
        step_eagerly(self.optimizer, gradients, options)


class CompiledOptimizer:
    """A functional form in Python, compiled by torch.jit where that can."""

    _compiling = threading.Lock()  # torch.jit's compiler is of one thread at a time

    def __init__(self, form: Any, parameters: list[torch.Tensor]):
        self._form, self._parameters = form, parameters
        self._turn = threading.Lock()
        self.module: torch.jit.ScriptModule | None = None  # whose `step(gradients)` does it, from C++ too
        with self._compiling, warnings.catch_warnings(), contextlib.suppress(Exception):  # it raises many kinds
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            self.module = torch.jit.script(_Steps(form))

    @property
    def state(self) -> Any:
        """The states by parameter; of a compiled form a copy of the mapping, with the states' own tensors."""
        return self._form.state if self.module is None else self.module.optim.state

    def step(self, gradients: Sequence[torch.Tensor | None], options: Mapping[str, Any] | None = None) -> None:
        """One update; without the GIL where it is compiled. The form may write to the gradients.

        Errors:
            UsageError: `options` that the form has not.
        """
        require_as_many(self._parameters, gradients)
        with self._turn, _with_options(self._form if self.module is None else self.module.optim, options):
            (self.module or self._form).step(list(gradients))


class _Steps(nn.Module):
    """torch.jit compiles classes that are attributes of a module."""

    def __init__(self, form: Any):
        super().__init__()
        self.optim = form

    @torch.jit.export
    def step(self, gradients: list[torch.Tensor | None]) -> None:
        self.optim.step(gradients)


@contextlib.contextmanager
def _with_options(form: Any, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Gives a form other hyper-parameters for a while, as attributes or in its dictionary `defaults`."""
    options, defaults = options or {}, getattr(form, "defaults", {})
    if unknown := [name for name in options if name not in defaults and not hasattr(form, name)]:
        raise UsageError(
            f"set_options(): {type(form).__name__} has no attribute {', '.join(unknown)}, and none in a dictionary "
            "`defaults`"
        )
    others = {name: value for name, value in options.items() if name not in defaults}
    if len(others) < len(options):
        others["defaults"] = {**defaults, **{name: value for name, value in options.items() if name in defaults}}
    before = {name: getattr(form, name) for name in others}
    try:
        for name, value in others.items():
            setattr(form, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(form, name, value)


_said: set[type] = set()


def _say_once(kind: type, why: str) -> None:
    if kind not in _said:
        _said.add(kind)
        warnings.warn(f"{kind.__name__} {why}: its updates hold the GIL", stacklevel=3)
