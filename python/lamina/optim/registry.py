# SPDX-License-Identifier: Apache-2.0
"""Facts about classes of optimizers: what each needs of a parameter, and its functional form.

[Note: functional forms] A functional form of an optimizer takes gradients in the place of `parameter.grad`: it is made
as `Functional(parameters, *args, **kwargs)`, has `step(gradients)`, one or None for each parameter, and `state`.
"""

import collections
import functools
import os
from collections.abc import Callable
from typing import Any, Literal

from torch import optim

from lamina import _lamina
from lamina.errors import UsageError
from lamina.optim import functional
from lamina.optim.engine_optimizer import EngineOptimizer

Needs = Literal["elements", "norms", "whole"]


class FunctionalForms(collections.UserDict):
    """Functional forms by optimizer class; the engine's own from the beginning. What a program sets counts."""

    def __setitem__(self, optimizer_class: type[optim.Optimizer], form: Callable[..., Any]) -> None:
        _check_class(optimizer_class, f"functional_optim_map[{optimizer_class!r}]")
        if not callable(form):
            raise UsageError(f"functional_optim_map[{optimizer_class.__name__}] = {form!r}: not a class")
        super().__setitem__(optimizer_class, form)


def _check_class(optimizer_class: Any, where: str) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, optim.Optimizer)):
        raise UsageError(f"{where}: not a class of torch.optim.Optimizer")


_NAMES = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "RMSprop", "Rprop", "Adamax", "NAdam", "RAdam")
_OWN = {getattr(optim, name): getattr(functional, name) for name in _NAMES}  # by torch's class
_OWN |= {kind: kind for kind in (*_OWN.values(), *(functional.QHM, functional.LAMB, functional.NovoGrad))}

_forms = FunctionalForms({kind: functools.partial(EngineOptimizer, own) for kind, own in _OWN.items()})
_forms[functional.FusedAdam] = functools.partial(EngineOptimizer, functional.FusedAdam)

_needs: dict[type[optim.Optimizer], Needs] = {
    **{kind: _lamina.functional(own._functional).needs for kind, own in _OWN.items()},
    **{optim.ASGD: "elements", functional.FusedAdam: "elements", optim.Adafactor: "whole", optim.Muon: "whole"},
}


def functional_forms() -> FunctionalForms:
    """The mapping that is `lamina.optim.DistributedOptimizer.functional_optim_map`."""
    return _forms


def engine_form(optimizer_class: type[optim.Optimizer]) -> type[functional.FunctionalOptimizer] | None:
    """Returns the class that has the engine's update of an optimizer, where that is what its entry says."""
    form = _forms.get(optimizer_class)
    is_engines = isinstance(form, functools.partial) and form.func is EngineOptimizer
    return form.args[0] if is_engines else None


def needs_of(optimizer_class: type[optim.Optimizer]) -> Needs | None:
    """Returns what an optimizer has to know of a parameter besides the elements that it updates: nothing, its norms, or
    all of it; None where nobody has said so."""
    return _needs.get(optimizer_class)


def register_functional_optimizer(
    optimizer_class: type[optim.Optimizer],
    form: Callable[..., Any] | str | os.PathLike[str] | None = None,
    *,
    needs: Literal["elements", "whole"] | None = None,
) -> None:
    """Says how an optimizer updates parameters that are remote, and what it needs of those that are sharded.

    Args:
        optimizer_class: the user's, or one of torch's or of ours, whose entry it replaces.
        form: a class like `torch.distributed.optim._FunctionalAdam`, made as `form(parameters, *args, **kwargs)`, with
            `step(gradients)` and `state`: it is compiled by torch.jit where that can, and runs without the GIL then. Or
            the path of a shared library (lamina/fused/plugin.h), whose hyper-parameters have the names of the groups'
            keys. None: as it was.
        needs: "elements" where each element is updated by itself; "whole" where an update looks at all of a parameter.
            A shared library says so itself. None: as it was.

    Errors:
        UsageError: not a class of optimizers, another word, or neither of both; a shared library without an optimizer,
            or with one whose name another one has.
    """
    if needs not in (None, "elements", "whole") or (form is None and needs is None):
        raise UsageError(
            f'register_functional_optimizer takes a form, needs="elements", or needs="whole", not {needs!r}'
        )
    _check_class(optimizer_class, f"register_functional_optimizer({optimizer_class!r}, ...)")
    if isinstance(form, (str, os.PathLike)):
        name = _lamina.load_functional(os.fspath(form))
        needs = _lamina.functional(name).needs
        kind = type(optimizer_class.__name__, (functional.FunctionalOptimizer, optimizer_class), {"_functional": name})
        form = functools.partial(EngineOptimizer, kind)
    if form is not None:
        _forms[optimizer_class] = form
    if needs is not None:
        _needs[optimizer_class] = needs
