# SPDX-License-Identifier: Apache-2.0
"""The job of a Trainer: a model and its optimizer are spread at its beginning, and whole again at its end."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lamina._lamina import Config
from lamina.elastic.change import change_now, checked, refused
from lamina.errors import UsageError
from lamina.job import current
from lamina.job.lifetime import init, shutdown
from lamina.job.messages import allgather, barrier
from lamina.job.ranks import WORLD
from lamina.optim.optimizer import DistributedOptimizer
from lamina.pipeline.distributed_model import DistributedModel
from lamina.pipeline.step import step
from lamina.tensor_parallel import unslicing
from lamina.torch_patches.compiled import left_alone
from lamina.trainer.shares import Ends, Loaders
from lamina.util.settings import replace


class Method(str):
    """The name of a method of the model: a call of the DistributedModel with it is a call of the method, in any
    layout."""


class TrainerJob:
    """A job that trains this model with this optimizer. It ends the job before it, and that one's Trainer.

    Args:
        config: as `lamina.init` takes it.
        module: the model; values are those of world rank 0.
        optimizer: of its parameters.
        scaling: of losses, by DistributedOptimizer's arguments.
        before_end, after_end: are called when the job is about to end, and when all is plain again.

    Attributes:
        is_training: whether `fit` is under way.
        outlives: makes a collective call, again where ranks are lost meanwhile that the others outlive.
    """

    def __init__(
        self,
        config: dict[str, Any],
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaling: dict[str, Any],
        before_end: Callable[[], None],
        after_end: Callable[[], None],
    ):
        _end_current()
        init(config)
        self._before_end, self._after_end = before_end, after_end
        self.is_training = self._is_measuring = False
        self.outlives: Callable[[Callable[[], Any]], Any] = lambda call: call()
        self.has_loaded = False  # values that a model in parts has from its first step on
        self._plain = dict(vars(optimizer))
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        self._dtypes = {name: tensor.dtype for name, tensor in _tensors(module)}
        self._undo = contextlib.ExitStack()
        replace(self._undo, module, "forward", functools.partial(_forward, module, module.forward))
        try:
            self.model = DistributedModel(module, average_grads_across_microbatches=False)
            self.optimizer = DistributedOptimizer(optimizer, **scaling)
        except BaseException:
            shutdown()  # for a next Trainer to begin anew
            self._undo.close()
            raise
        self._added = vars(optimizer).keys() - self._plain.keys()
        current.job().own(_Trainers).latest = self
        current.job().lasting = [_Trainers, Loaders, Ends]

    def require(self, what: str, amid_training: bool = True) -> None:
        """UsageError where it has ended, in an event inside of a step, and perhaps in any of a training."""
        if not current.is_initialized() or current.job().model is not self.model:
            raise UsageError(f"{what}: this Trainer was closed, or another one was made after it")
        current.outside_step(what)
        if self.is_training and not amid_training:
            raise UsageError(f"{what}: a callback of fit() calls it: state.max_duration says how far that one goes")

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Inside, the job may not end."""
        self.is_training = True
        try:
            yield
        finally:
            self.is_training = False

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, the layout may not change, unless in a training."""
        before, self._is_measuring = self._is_measuring, True
        try:
            yield
        finally:
            self._is_measuring = before

    def other_layout(self, keys: dict[str, Any]) -> Config:
        """The configuration in another layout, see `lamina.change`. Errors: what refuses it; nothing has changed."""
        self.require("lamina.change()")
        if self._is_measuring and not self.is_training:
            raise refused("a callback of eval() or predict() calls it: call it before or after that")
        take_loaded()
        current.job().saves.end()
        return checked(current.job(), keys)

    def change(self, keys: dict[str, Any]) -> None:
        """Goes over to another layout, with what belongs to the training."""
        self.optimizer.zero_grad(set_to_none=True)
        change_now(current.job(), keys)
        self.has_loaded = False

    def at_end(self, undo: Callable[..., None], *arguments: Any) -> None:
        """Has something called when the job has ended."""
        self._undo.callback(undo, *arguments)

    def end(self) -> None:
        """Ends the job, where it has not; every rank calls it. The model is the plain one again, with all values and
        buffers on every rank, in the dtypes that they had, and so is the optimizer, with all states."""
        if not current.is_initialized() or current.job().model is not self.model:
            return
        if self.is_training:
            raise UsageError(
                "a Trainer is closed, or another one made, when fit() has ended, not in one of its callbacks: "
                "state.stop_training() ends it"
            )
        try:
            self._before_end()
        finally:
            self._make_whole()
            self._after_end()

    def _make_whole(self) -> None:
        values, states = self.outlives(self._gathered)
        current.job().own(Loaders).end_workers()
        shutdown()
        self._undo.close()
        unslicing.forget(self.model.module)
        new = self._give_back(values)
        for name in self._added:
            vars(self.optimizer).pop(name, None)
        vars(self.optimizer).update({name: value for name, value in self._plain.items() if callable(value)})
        for group, parameters in zip(self.optimizer.param_groups, self._parameters, strict=True):
            group["params"] = [new.get(id(parameter), parameter) for parameter in parameters]
        every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, master in states.get("masters", {}).items():
            every[number].data = master
        for name, tensor in _tensors(self.model.module):
            tensor.data = tensor.data.to(self._dtypes.get(name, tensor.dtype))
        self.optimizer.state.clear()
        self.optimizer.load_state_dict({name: states[name] for name in ("state", "param_groups")})

    def _gathered(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All values, and the states of the optimizer."""
        take_loaded()
        values, states = self.model.state_dict(), self.optimizer.state_dict()
        if self.model.partitioned:
            self._here = self._names_here()
            values |= self._buffers_beside(values)
        else:
            self._here = values.keys()
        barrier()
        return values, states

    def _names_here(self) -> set[str]:
        """The names of what is on this rank, all those of tied parameters."""
        module = self.model.module
        here = set(map(id, (*self.model.local_parameters(), *self.model.local_buffers())))
        return {name for name, tensor in _tensors(module) if id(tensor) in here}

    def _buffers_beside(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The buffers of all ranks that a state dict has not, by name: those that no checkpoint keeps."""
        named = self.model.module.named_buffers(remove_duplicate=False)
        own = {name: buffer for name, buffer in named if name in self._here and name not in values}
        return {name: buffer for theirs in allgather(own, WORLD) for name, buffer in theirs.items()}

    def _give_back(self, values: dict[str, torch.Tensor]) -> dict[int, nn.Parameter]:
        """Puts all values into the model. Returns the parameters that are others now, by the ids of the old ones: those
        that were on other ranks alone."""
        module, new = self.model.module, {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            place, _, own = name.rpartition(".")
            if name in self._here:
                parameter.grad = None
                parameter.data = values[name]
            else:
                made = new.setdefault(id(parameter), nn.Parameter(values[name], parameter.requires_grad))
                module.get_submodule(place)._parameters[own] = made
        for place, part in module.named_modules(remove_duplicate=False):
            for own in part._buffers:  # those of None, too: another partition may have set them
                name = f"{place}.{own}" if place else own
                if name in values and name not in self._here:
                    part._buffers[own] = values[name]
        return new


class _Trainers:
    """The Trainer's job that a job of lamina's is, if it is one."""

    latest: TrainerJob | None = None


def take_loaded() -> None:
    """Has the model the values that a checkpoint has loaded, where they wait for its first step."""
    latest = current.job().own(_Trainers).latest
    if latest.has_loaded and not latest.model.partitioned:
        _cut()


@step
def _cut() -> None:
    """The first step cuts the model, though this one does not call it."""


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, by all names of tied ones."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _forward(module: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    if args and type(args[0]) is Method:
        return _call_method(module, *args, **kwargs)
    return forward(*args, **kwargs)


@left_alone
def _call_method(module: nn.Module, name: Method, *args: Any, **kwargs: Any) -> Any:
    return getattr(module, name)(*args, **kwargs)


def _end_current() -> None:
    if not current.is_initialized():
        return
    if (latest := current.job().own(_Trainers).latest) is None:
        raise UsageError(
            "a Trainer begins its job itself: call no lamina.init(), its keys are Trainer(lamina_config={...})"
        )
    latest.end()
