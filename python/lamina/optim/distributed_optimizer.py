# SPDX-License-Identifier: Apache-2.0
"""Optimizers of parameters that other ranks own: each owner updates its own."""

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import optim

from lamina import _lamina
from lamina.errors import UsageError
from lamina.job import current
from lamina.optim.local_optimizer import local_optimizer
from lamina.optim.registry import FunctionalForms, engine_form, functional_forms
from lamina.remote import RemoteParameter
from lamina.remote.contexts import require_context
from lamina.remote.placed import run_on, share

_EAGER_FLAGS = ("differentiable", "capturable")


class DistributedOptimizer:
    """An optimizer over remote parameters: each rank updates those that it owns, in parallel, with the gradients of a
    context.

        optimizer = lamina.optim.DistributedOptimizer(torch.optim.AdamW, net.parameters(), lr=1e-3)
        with lamina.remote.context() as context:
            lamina.remote.backward(context, loss)
            optimizer.step(context)

    Each has states of its own; to share them send the optimizer itself to other ranks (`lamina.broadcast`).

    Args:
        optimizer_class: one of torch's or of `lamina.optim`, which the engine updates without the GIL. One that has a
            functional form in `functional_optim_map` is updated so, too, where TorchScript compiles it. Any other runs
            as it is and holds the GIL, and one line on the owner says so.
        remote_parameters: of `lamina.remote`, or RRefs of torch.distributed.rpc, whose contexts are those of
            torch.distributed.autograd.
        args, kwargs: of the class, for all parameters.

    Attributes:
        functional_optim_map: functional forms by optimizer class; see [Note: functional forms] in registry.py, and
            `register_functional_optimizer`. Every owner looks into its own: register on all ranks. An entry of yours
            wins over ours.

    Errors:
        UsageError: an optimizer in place of a class, no parameters, one twice, or LBFGS. ValueError: hyper-parameters
            that the class refuses. PeerError: an owner is lost.
    """

    functional_optim_map: ClassVar[FunctionalForms] = functional_forms()

    def __init__(
        self,
        optimizer_class: type[optim.Optimizer],
        remote_parameters: Iterable[RemoteParameter],
        *args: Any,
        **kwargs: Any,
    ):
        _check_class(optimizer_class)
        parameters = list(remote_parameters)
        _check_parameters(parameters)
        self._hyper = _Hyper.of(optimizer_class, [1] * len(getattr(parameters[0], "shape", [1])), args, kwargs)
        if isinstance(parameters[0], RemoteParameter):
            self._owners: _Owners | _RRefOwners = _Owners(self._hyper, parameters)
        else:
            self._owners = _RRefOwners(self._hyper, parameters)

    def set_options(self, **options: Any) -> None:
        """Sets hyper-parameters for the next steps of this object, as a schedule does: `set_options(lr=1e-4)`. They
        travel with each step: another trainer that shares the optimizer has its own.

        Args:
            **options: arguments of the class, by name; those that are not given stay.

        Errors:
            UsageError: one that the class does not have.
            ValueError: what the class says of their values.
        """
        self._hyper = self._hyper.changed(options)
        self._owners.take(self._hyper)

    def step(self, context: Any) -> None:
        """Updates every parameter that has a gradient in the context, once; returns when all owners have.

        Errors:
            UsageError: the context has ended, is another job's, had no backward, or was used for this update before; a
                user's functional form has no option that was set.
            RemoteError: what an owner raised; the others have made their updates. PeerError: an owner is lost.
        """
        self._owners.step(context)


class _Hyper:
    """A class with its arguments, which it has accepted.

    Attributes:
        ours: the engine's form of it, and its hyper-parameters in the order of that; None where it has none.
        options: those that were changed since it was made, by name.
    """

    def __init__(self, kind: type, args: tuple, kwargs: dict[str, Any], ours: tuple[str, list[float]] | None):
        self.kind, self.args, self.kwargs, self.ours = kind, args, kwargs, ours
        self.options: dict[str, Any] = {}

    @staticmethod
    def of(kind: type, sizes: list[int], args: tuple, kwargs: dict[str, Any]) -> "_Hyper":
        # The class says itself what is wrong, before anything is sent.
        trial = kind([torch.nn.Parameter(torch.zeros(sizes))], *args, **kwargs)
        form = engine_form(kind)
        if form is None or any(trial.defaults.get(flag) for flag in _EAGER_FLAGS):
            return _Hyper(kind, args, kwargs, None)
        mine = trial if form is kind else form([torch.nn.Parameter(torch.zeros(sizes))], *args, **kwargs)
        return _Hyper(kind, args, kwargs, (mine._functional, mine._values(mine.param_groups[0])))

    def changed(self, options: dict[str, Any]) -> "_Hyper":
        """These with others in the place of some."""
        names = list(inspect.signature(self.kind).parameters)[1:]
        given = dict(zip(names, self.args, strict=False)) | self.kwargs
        known = self.kind([torch.nn.Parameter(torch.zeros(1, 1))], **given).defaults.keys() & {*names, *given}
        if unknown := [name for name in options if name not in known]:
            raise UsageError(
                f"set_options({', '.join(unknown)}): {self.kind.__name__} has the options {', '.join(sorted(known))}"
            )
        made = _Hyper.of(self.kind, [1, 1], (), given | options)
        if (made.ours is None) != (self.ours is None):
            raise UsageError("set_options(): differentiable and capturable stay as the optimizer was made with them")
        made.options = self.options | options
        return made

    def of_step(self) -> Any:
        """Returns what goes with a step: the engine's numbers, or options by name; None where none was changed."""
        if not self.options:
            return None
        return self.ours[1] if self.ours is not None else self.options


class _Owners:
    """The owners of parameters of lamina.remote."""

    def __init__(self, hyper: _Hyper, parameters: list[RemoteParameter]):
        session = current.outside_step("lamina.optim.DistributedOptimizer()").session
        if hyper.ours is not None:
            addresses = [parameter._address for parameter in parameters]
            self._engine = session.make_remote_optimizer(*hyper.ours, addresses)
            return
        owners: dict[tuple[int, int], list[int]] = {}
        for parameter in parameters:
            owner, job, number = parameter._address
            owners.setdefault((owner, job), []).append(number)
        made = [
            (owner, job, run_on(owner, _add_here, hyper.kind, numbers, hyper.args, hyper.kwargs))
            for (owner, job), numbers in owners.items()
        ]
        self._engine = _lamina.RemoteOptimizer(made)

    def take(self, hyper: _Hyper) -> None:
        self._engine.hyper = hyper.of_step()

    def step(self, context: Any) -> None:
        session, engine = require_context(context, "DistributedOptimizer.step()")
        session.remote_step(engine, self._engine)

    def __getstate__(self) -> tuple:
        for part in self._engine.parts:
            share(part, is_module=False)
        return self._engine.parts, self._engine.needs_norm, self._engine.hyper

    def __setstate__(self, state: tuple) -> None:
        *made, hyper = state
        self._engine = _lamina.RemoteOptimizer(*made)
        self._engine.hyper = hyper


class _RRefOwners:
    """The workers of torch.distributed.rpc that own what RRefs refer to."""

    def __init__(self, hyper: _Hyper, parameters: list[Any]):
        self._rpc = importlib.import_module("torch.distributed.rpc")
        owners: dict[Any, list[Any]] = {}
        for parameter in parameters:
            owners.setdefault(parameter.owner(), []).append(parameter)
        self._parts = [self._rpc.remote(owner, _LocalOptimizer, args=(hyper, rrefs)) for owner, rrefs in owners.items()]
        for part in self._parts:
            self._rpc.rpc_sync(part.owner(), _check_made, args=(part,))
        self._hyper: Any = None

    def take(self, hyper: _Hyper) -> None:
        self._hyper = hyper.of_step()

    def step(self, context: Any) -> None:
        if isinstance(context, bool) or not isinstance(context, int):
            raise UsageError(
                "DistributedOptimizer.step() over RRefs takes the id of a context of torch.distributed.autograd, not "
                f"{context!r}"
            )
        started = [
            self._rpc.rpc_async(part.owner(), _step_rref, args=(part, context, self._hyper)) for part in self._parts
        ]
        failed = None
        for future in started:  # all of them: nothing goes on there when this returns
            try:
                future.wait()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed


class _LocalOptimizer:
    """The part of an optimizer over RRefs on one worker."""

    def __init__(self, hyper: _Hyper, rrefs: list[Any]):
        self._parameters = [rref.local_value() for rref in rrefs]
        aliases = [_lamina.writable(parameter) for parameter in self._parameters]
        if hyper.ours is not None:
            name, values = hyper.ours
            updater = _lamina.functional_updater(_lamina.functional(name), values, len(aliases))
        else:
            updater = _made_here(hyper.kind, aliases, hyper.args, hyper.kwargs)
        self._optimizer = _lamina.LocalOptimizer(self._parameters, updater)

    def step(self, context: int, hyper: Any) -> None:
        found = importlib.import_module("torch.distributed.autograd").get_gradients(context)
        self._optimizer.step([found.get(parameter) for parameter in self._parameters], hyper)


def _check_made(part: Any) -> None:
    part.local_value()


def _step_rref(part: Any, context: int, hyper: Any) -> None:
    part.local_value().step(context, hyper)


def _add_here(kind: type, numbers: list[int], args: tuple, kwargs: Mapping[str, Any]) -> int:
    """On the owner: makes an optimizer of parameters here; returns its number."""
    server = current.session().parameter_server
    aliases = [server.writable(number) for number in numbers]
    return server.add_optimizer(numbers, _made_here(kind, aliases, args, kwargs))


def _made_here(kind: type, aliases: list[torch.Tensor], args: tuple, kwargs: Mapping[str, Any]) -> _lamina.Updater:
    """An optimizer that is not the engine's. `aliases` share the parameters' memory: it sees nobody else's `.grad`."""
    made = local_optimizer(kind, aliases, *args, **kwargs)
    module = getattr(made, "module", None)
    return _lamina.python_updater(made.step) if module is None else _lamina.script_updater(module)


def _check_class(kind: Any) -> None:
    if isinstance(kind, optim.Optimizer):
        raise UsageError(
            "lamina.optim.DistributedOptimizer takes a class and remote parameters, not an optimizer: the one of a "
            "model that is cut is lamina.DistributedOptimizer(optimizer)"
        )
    if not (isinstance(kind, type) and issubclass(kind, optim.Optimizer)):
        raise UsageError(f"lamina.optim.DistributedOptimizer takes an optimizer's class, not {kind!r}")
    if issubclass(kind, optim.LBFGS):
        raise UsageError("LBFGS evaluates the loss several times in a step: an owner of parameters has no loss")


def _check_parameters(parameters: list[Any]) -> None:
    if not parameters:
        raise UsageError("lamina.optim.DistributedOptimizer: no remote parameters")
    if all(isinstance(parameter, RemoteParameter) for parameter in parameters):
        known = {parameter._address for parameter in parameters}
        if len(known) < len(parameters):
            raise UsageError("lamina.optim.DistributedOptimizer: a remote parameter stands twice in its list")
        return
    if all(_is_rref(parameter) for parameter in parameters):
        return
    kinds = sorted({type(parameter).__name__ for parameter in parameters})
    raise UsageError(
        "lamina.optim.DistributedOptimizer takes remote parameters, all of lamina.remote or all RRefs of "
        f"torch.distributed.rpc, not {', '.join(kinds)}"
    )


def _is_rref(parameter: Any) -> bool:
    if not torch.distributed.is_available() or not torch.distributed.rpc.is_available():
        return False
    return isinstance(parameter, torch.distributed.rpc.PyRRef)
