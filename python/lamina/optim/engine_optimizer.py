# SPDX-License-Identifier: Apache-2.0
"""Functional forms of optimizers whose update is the engine's."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lamina.errors import said
from lamina.optim.functional import FunctionalOptimizer


def require_as_many(parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
    """ValueError, in torch's words, unless there is a gradient, or None, for each parameter."""
    if len(parameters) != len(gradients):
        raise ValueError(said("as-many-gradients", len(parameters), len(gradients)))


_turn = threading.Lock()


@contextlib.contextmanager
def changed(values: dict[str, Any], others: Mapping[str, Any] | None) -> Iterator[None]:
    """A dictionary has other values for a while."""
    before = dict(values)
    values.update(others or {})
    try:
        yield
    finally:
        values.clear()
        values.update(before)


def step_eagerly(
    optimizer: torch.optim.Optimizer,
    gradients: Sequence[torch.Tensor | None],
    options: Mapping[str, Any] | None = None,
) -> None:
    """A step of an optimizer with gradients put where it looks for them, and with other options; the parameters' own
    gradients are left alone. Threads take turns, whatever the optimizer: a parameter may be in several."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with _turn, contextlib.ExitStack() as others:
        for group in optimizer.param_groups:
            others.enter_context(changed(group, options))
        own = [parameter.grad for parameter in parameters]
        try:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        finally:
            for parameter, gradient in zip(parameters, own, strict=True):
                parameter.grad = gradient


class EngineOptimizer:
    """A functional form, see [Note: functional forms]. Threads that call `step` take turns; it releases the GIL, but
    where torch's own update is taken.

    Args:
        kind: one of ours, whose arguments follow, and are checked as its own.
    """

    def __init__(
        self,
        kind: type[FunctionalOptimizer],
        parameters: Iterable[torch.Tensor],
        *args: Any,
        _allow_empty_param_list: bool = False,
        **kwargs: Any,
    ):
        parameters = list(parameters)
        if not parameters and not _allow_empty_param_list:
            raise ValueError("optimizer got an empty parameter list")
        self.optimizer = kind([{"params": parameters}], *args, **kwargs)

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The states by parameter, with torch's names."""
        return self.optimizer.state

    def step(self, gradients: Sequence[torch.Tensor | None], options: Mapping[str, Any] | None = None) -> None:
        """One update. `gradients`: for each parameter one, or None; `options`: of this step alone.

        Errors:
            ValueError: more or fewer gradients than parameters.
            UsageError: what `optimizer.step()` refuses.
        """
        require_as_many(self.optimizer.param_groups[0]["params"], gradients)
        if not self.optimizer.is_fused():
            step_eagerly(self.optimizer, gradients, options)
            return
        with self.optimizer.turn(), changed(self.optimizer.param_groups[0], options):
            self.optimizer.step_with(gradients)
