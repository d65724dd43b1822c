# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose update is one pass of the engine's over memory: without the GIL, and without a call per tensor."""

import functools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import _global_optimizer_post_hooks as all_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as all_pre_hooks

from lamina import _lamina
from lamina.errors import UsageError
from lamina.job import current
from lamina.torch_patches import clipping


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step within torch's wrapper where somebody hears of it. That calls the hooks, and enters the profiler, which
    takes longer than a small step where there is none."""
    watched = optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def hooked(self: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        has_closure = bool(args or kwargs)  # which may add hooks, and takes longer than any wrapper
        return (watched if _is_watched(self, has_closure) else step)(self, *args, **kwargs)

    hooked.hooked = True  # torch wraps it no more
    return hooked


_TORCHS_WRAPPER = optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


def _is_watched(optimizer: optim.Optimizer, has_closure: bool) -> bool:
    if getattr(type(optimizer).step, "__code__", None) is _TORCHS_WRAPPER:
        return False  # a step that a subclass has in the place of ours, and which torch has wrapped
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return has_closure or bool(own or all_pre_hooks or all_post_hooks) or _lamina.functions_are_recorded()


class FunctionalOptimizer(optim.Optimizer):
    """A torch optimizer with the engine's update: schedulers, groups, hooks and state dicts are torch's, and so are the
    states. `_functional` names the engine's form of it."""

    _functional: str  # a class made of one of torch's goes by its own name

    def __init_subclass__(cls, **arguments: Any):
        super().__init_subclass__(**arguments)
        if FunctionalOptimizer in cls.__bases__ and "_functional" not in vars(cls):
            cls._functional = cls.__name__

    def _form(self) -> _lamina.Functional:
        return _lamina.functional(self._functional)

    def _values(self, group: Mapping[str, Any]) -> list[float]:
        """The hyper-parameters of a group, in the order of the engine's form."""
        values = []
        for key, place, choices, preset in _hyper_fields(self._form()):
            if key not in group and math.isnan(preset):
                raise UsageError(
                    f"the functional form {self._functional} needs a value of {key}, which groups of "
                    f"{type(self).__name__} have not: name its hyper-parameters as the optimizer's arguments"
                )
            value = group.get(key, preset)
            value = value if place is None or key not in group else value[place]
            values.append(float(choices.index(value) if choices else value))
        return values

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("_functional", "set_grad_none") if name in self.__dict__}
        return super().__getstate__() | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch gives numbers the parameter's type; they keep their own.
        numbers = self._form().numbers
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                is_number = name in numbers or parameter.dim() > 0
                if is_number and isinstance(value, torch.Tensor) and value.dim() == 0:
                    self.state[parameter][name] = value.detach().clone()

    @_hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient. Where a group is `differentiable` or `capturable`, or
        has a parameter twice, or one of a tensor subclass with a dispatch of its own (DTensor), it is torch's own,
        where torch has one. Threads take turns.

        Args:
            closure: computes the loss again, and the gradients; called first.

        Returns:
            What the closure returned.

        Raises:
            UsageError: for sparse gradients, and parameters whose elements overlap in memory.
        """
        with self.turn():
            groups = self._fused_groups()
            if groups is not None and closure is None:
                return self._update_scaled(groups)
        if groups is None:
            return _without_hooks(super().step)(closure)
        with torch.enable_grad():
            loss = closure()
        with self.turn():
            self._update_scaled(self._known_groups())
        return loss

    def _update_scaled(self, groups: list[_lamina.OptimizerGroup]) -> None:
        """As torch's GradScaler leaves it to optimizers made with fused=True."""
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is None and scale is None:
            return self._update(groups, 1.0)
        found = torch.zeros_like(scale) if found is None else found
        scale = torch.ones_like(found) if scale is None else scale
        both = torch.cat((found.reshape(1), scale.reshape(1))).tolist()  # with one wait, where a device has them
        if not both[0]:
            self._update(groups, 1.0 / both[1])

    def is_fused(self) -> bool:
        """False where an update is torch's own; UsageError where torch has none."""
        with self.turn():
            return self._fused_groups() is not None

    def _fused_groups(self) -> list[_lamina.OptimizerGroup] | None:
        groups = self._known_groups()
        plain = all(group.each_once and group.have_own_elements for group in groups)
        if plain and not any(map(_is_recorded, self.param_groups)):
            return groups
        kinds = type(self).__mro__
        if kinds[kinds.index(FunctionalOptimizer) + 1] is optim.Optimizer:
            raise UsageError(
                f"{type(self).__name__} updates parameters that are each listed once, with nothing recorded, and that "
                "are no tensor subclass with __torch_dispatch__, as DTensor is"
            )
        return None

    def step_with(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """One update of the only group, which `is_fused`, with gradients that are no attributes of the parameters: one,
        or None, for each. No hooks are called.

        Raises:
            UsageError: as `step`.
        """
        with self.turn():
            self._update(self._known_groups(), 1.0, gradients)

    def _update(
        self,
        groups: list[_lamina.OptimizerGroup],
        factor: float,
        gradients: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        values = [self._values(group) for group in self.param_groups]
        if (around := self.__dict__.get("_around")) is not None:
            _lamina.optimizer_step(groups, values, factor * around.factor, around.norm, gradients, around.parameters)
            return
        norm = self._gradient_norm(groups, factor, gradients) if self._form().norm else 0.0
        _lamina.optimizer_step(groups, values, factor, norm, gradients)

    @contextmanager
    def around(self, terms: _lamina.UpdateTerms) -> Iterator[None]:
        """Has an update within be one of a DistributedOptimizer's."""
        self._around = terms
        try:
            yield
        finally:
            del self._around

    def turn(self) -> AbstractContextManager[Any]:
        """Held by the thread that takes a step: others wait for it. A signal handler runs in the thread that it
        interrupts, and must not wait for that thread. A forked process must not wait for a thread that it lacks."""
        return self.__dict__.setdefault("_locks", {}).setdefault(os.getpid(), threading.RLock())

    def _known_groups(self) -> list[_lamina.OptimizerGroup]:
        return [self._group(place) for place in range(len(self.param_groups))]

    def _gradient_norm(
        self,
        groups: list[_lamina.OptimizerGroup],
        factor: float,
        gradients: Sequence[torch.Tensor | None] | None,
    ) -> float:
        """The norm of all gradients, those of other ranks' parameters included."""
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        is_global = gradients is None and clipping.are_global(own)
        if is_global and current.job().sliced:
            return abs(factor) * float(clipping.grad_norm(own, 2.0, False, None))
        squares = _lamina.squared_gradient_norm(groups, factor, gradients)
        if is_global:
            squares = sum(current.outside_step("optimizer.step()").session.all_gather("one_copy", squares))
        return math.sqrt(squares)

    def _group(self, place: int) -> _lamina.OptimizerGroup:
        known: dict[int, _lamina.OptimizerGroup] = self.__dict__.setdefault("_groups", {})
        parameters = self.param_groups[place]["params"]
        if place not in known or not known[place].is_of(parameters, self.state):
            known[place] = _lamina.OptimizerGroup(self._form(), parameters, self.state)
        return known[place]


def class_name(optimizer: optim.Optimizer) -> str:
    """The name that checkpoints have for its class: "AdamW", for one of torch's and for the engine's."""
    return optimizer._functional if isinstance(optimizer, FunctionalOptimizer) else type(optimizer).__name__


@functools.cache
def _hyper_fields(form: _lamina.Functional) -> list[tuple[str, int | None, list[str], float]]:
    return form.hyper


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a bound `step` of torch's without the wrapper that calls hooks: our own step has called them. Torch adds
    the wrapper when the first optimizer of a class is made."""
    function = step.__func__
    return (function.__wrapped__ if getattr(function, "hooked", False) else function).__get__(step.__self__)


def _is_recorded(group: Mapping[str, Any]) -> bool:
    return bool(group.get("differentiable") or group.get("capturable"))


class SGD(FunctionalOptimizer, optim.SGD):
    """torch's SGD."""


class Adam(FunctionalOptimizer, optim.Adam):
    """torch's Adam."""


class AdamW(FunctionalOptimizer, optim.AdamW):
    """torch's AdamW."""


class Adagrad(FunctionalOptimizer, optim.Adagrad):
    """torch's Adagrad."""


class Adadelta(FunctionalOptimizer, optim.Adadelta):
    """torch's Adadelta."""


class RMSprop(FunctionalOptimizer, optim.RMSprop):
    """torch's RMSprop."""


class Rprop(FunctionalOptimizer, optim.Rprop):
    """torch's Rprop."""


class Adamax(FunctionalOptimizer, optim.Adamax):
    """torch's Adamax."""


class NAdam(FunctionalOptimizer, optim.NAdam):
    """torch's NAdam."""


class RAdam(FunctionalOptimizer, optim.RAdam):
    """torch's RAdam."""


Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class _Own(FunctionalOptimizer):
    """One that torch has not: its checks are the engine's."""

    set_grad_none = True  # by zero_grad()

    def __init__(self, params: Parameters, defaults: dict[str, Any]):
        self._check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forgets the gradients, or makes them zero; `set_to_none` is `set_grad_none` where it is not given."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def _check(self, group: Mapping[str, Any]) -> None:
        for name, _, choices, _ in self._form().hyper:
            if choices and group[name] not in choices:
                raise ValueError(f"Invalid {name} value: {group[name]}")
        try:
            self._form().check(self._values(group))
        except UsageError as error:
            raise ValueError(str(error)) from None


class FusedAdam(_Own):
    """Adam, or AdamW with `adam_w_mode`, with apex's arguments.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        bias_correction: whether moments are divided by what their first steps lack.
        betas: the decay of the first moment and of the second one.
        eps: is added to the root of the second moment.
        adam_w_mode: whether a step takes the decay off the weights; else it is added to the gradient.
        weight_decay: parts of the weights.
        amsgrad: False; there is no such variant here.
        set_grad_none: whether `zero_grad()` lets go of gradients; else it fills them with zeros.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ):
        if amsgrad:
            raise RuntimeError("FusedAdam has no AMSGrad variant")
        self._functional = "AdamW" if adam_w_mode else "Adam"
        self.set_grad_none = set_grad_none
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)


class LAMB(_Own):
    """Adam's direction with a trust ratio per parameter (You et al., 2020), with the arguments of apex's FusedLAMB.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        bias_correction: whether moments are divided by what their first steps lack.
        betas: the decay of the first moment and of the second one.
        eps: is added to the root of the second moment.
        weight_decay: parts of the weights that a step takes off them, times `lr`.
        amsgrad: False; LAMB has no such variant.
        adam_w_mode: whether the decay is added to the direction; else it is added to the gradient.
        grad_averaging: whether the first moment takes `1 - betas[0]` of a gradient; else it takes all of it.
        set_grad_none: whether `zero_grad()` lets go of gradients; else it fills them with zeros.
        max_grad_norm: gradients are first divided by their global norm over this, where that is larger than 1.
        use_nvlamb: whether parameters without a decay have a trust ratio, too.
    """

    _functional = "LAMB"

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ):
        if amsgrad:
            raise RuntimeError("LAMB has no AMSGrad variant")
        self.set_grad_none = set_grad_none
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults)


class NovoGrad(_Own):
    """Adam with one second moment per parameter, of its gradient's norm (Ginsburg et al., 2019), with the arguments of
    apex's FusedNovoGrad.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        bias_correction: whether moments are divided by what their first steps lack.
        betas: the decay of the first moment and of the second one.
        eps: is added to the norm by which gradients are divided.
        weight_decay: parts of the weights that a step takes off them, times `lr`.
        amsgrad: False; NovoGrad has no such variant.
        reg_inside_moment: whether the decay is added to the gradient before the first moment; else to the direction.
        grad_averaging: whether the first moment takes `1 - betas[0]` of a gradient; else it takes all of it.
        norm_type: 2 for the root of the sum of squares, 0 for the largest element.
        init_zero: whether the second moment begins with 0; else with the first gradient's norm.
        set_grad_none: whether `zero_grad()` lets go of gradients; else it fills them with zeros.
    """

    _functional = "NovoGrad"

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ):
        if amsgrad:
            raise RuntimeError("NovoGrad has no AMSGrad variant")
        self.set_grad_none = set_grad_none
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "reg_inside_moment": reg_inside_moment,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults)


class QHM(_Own):
    """Quasi-hyperbolic momentum (Ma and Yarats, 2019): a step of `lr` along `nu` parts of the momentum and `1 - nu` of
    the gradient.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        momentum: the decay of the momentum.
        nu: the part of the momentum in a step.
        weight_decay: parts of the weights.
        weight_decay_type: "grad" adds the decay to the gradient, "direct" takes it from the parameter.
    """

    _functional = "QHM"

    def __init__(
        self,
        params: Parameters,
        lr: float,
        momentum: float,
        nu: float,
        weight_decay: float = 0.0,
        weight_decay_type: str = "grad",
    ):
        defaults = {"lr": lr, "momentum": momentum, "nu": nu, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"weight_decay_type": weight_decay_type})
