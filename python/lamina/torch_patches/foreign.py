# SPDX-License-Identifier: Apache-2.0
"""Uses of parameters and modules that another rank owns, other than calls.

Their owner does not learn of it: what would be ignored in silence is an error, or a warning where it only misleads.
Whether parameters require grad, training flags, autocast and the like travel with each call.
"""

import functools
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import autograd, nn
from torch.nn.modules import module as registrations
from torch.optim import optimizer as optimizers

from lamina import _lamina
from lamina.errors import UsageError, refusal
from lamina.job import current
from lamina.libraries import hugging_face
from lamina.util.settings import replace

_HOOKS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
    "register_backward_hook",
)


def install(undo: ExitStack) -> None:
    """Until `undo` is closed, what is done to parts of other ranks is refused, or told."""
    watch_slices(undo)
    for name in _HOOKS:
        _replace(nn.Module, name, _refuse_hook, undo)
    for name in ("_apply", "zero_grad", "load_state_dict"):
        _replace(nn.Module, name, _refuse_for_parts, undo)
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        _replace(nn.Parameter, name, _refuse_tensor_hook, undo)
    _replace(torch.optim.Optimizer, "zero_grad", _refuse_zero_grad, undo)
    _replace(autograd, "_engine_run_backward", _refuse_inputs, undo)
    for kind in ("parameter", "buffer", "module"):
        register = getattr(registrations, f"register_module_{kind}_registration_hook")
        undo.callback(register(_refuse_registration).remove)
    before_step = functools.partial(_before_optimizer_step, weakref.WeakSet())
    undo.callback(optimizers.register_optimizer_step_pre_hook(before_step).remove)


def watch_slices(undo: ExitStack) -> None:
    """Until `undo` is closed, a parameter that gets another value by `parameter.data = ...` is a guarded slice where it
    was one, and the gradient of a slice that a script reads is guarded."""
    _lamina.watch_parameters(nn.Parameter)
    undo.callback(_lamina.forget_parameters, nn.Parameter)


def _replace(owner: Any, name: str, check: Callable, undo: ExitStack) -> None:
    """Has `check(name, *args)` look at each call of a function first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(name, *args, **kwargs)
        return original(*args, **kwargs)

    replace(undo, owner, name, checked)


def _home_of(module: nn.Module) -> tuple[str, int] | None:
    """In a step: the name and partition of a module that another rank owns; None for any other."""
    if not _lamina.in_step() or (job := current.job_if_any()) is None or (model := job.partitioned_model) is None:
        return None
    partition = model.elsewhere(module)
    return None if partition is None else (model.tree.names[model.tree.node(module)] or "the model", partition)


def _refuse_hook(method: str, module: nn.Module, hook: Any, *_: Any, **__: Any) -> None:
    if not hugging_face.is_collector(hook) and (home := _home_of(module)) is not None:
        raise UsageError(
            f"{home[0]}.{method}() in a step: the module runs on partition {home[1]}, where the hook is not known; "
            "register it before the step, on every rank",
            code="step-foreign-module",
        )


def _refuse_tensor_hook(method: str, parameter: nn.Parameter, *_: Any, **__: Any) -> None:
    if _lamina.in_step() and (where := _lamina.where_released(parameter)):
        raise UsageError(
            f"{method}() of a parameter in a step ({where}): there the hook is not known; register it before the "
            "step, on every rank",
            code="step-foreign-module",
        )


def _refuse_for_parts(method: str, module: nn.Module, *_: Any, **__: Any) -> None:
    if not _lamina.in_step():
        return
    for part in module.modules():
        if (home := _home_of(part)) is not None:
            what = "to(), half() and the like" if method == "_apply" else f"{method}()"
            raise UsageError(
                f"{what} of a module in a step, whose part {home[0]} lives on partition {home[1]}, where it would not "
                "happen: do it outside of step functions, on every rank",
                code="step-foreign-module",
            )


def _refuse_registration(module: nn.Module, name: str, value: Any) -> None:
    if (home := _home_of(module)) is not None:
        raise UsageError(
            f"{home[0]}.{name} was set to a new {type(value).__name__} in a step: the module runs on partition "
            f"{home[1]}, which goes on with the one that it has; change a model between steps, on every rank",
            code="step-foreign-module",
        )


def _of_model(optimizer: torch.optim.Optimizer) -> bool:
    known = set(map(id, current.job().model.parameters()))
    return any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"])


def _refuse_zero_grad(_: str, optimizer: torch.optim.Optimizer, *__: Any, **___: Any) -> None:
    if _lamina.in_step() and _of_model(optimizer):
        current.everywhere("optimizer.zero_grad()")


def _before_optimizer_step(
    told: weakref.WeakSet[torch.optim.Optimizer], optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    """Looks at an optimizer that is no DistributedOptimizer, at its first step."""
    job = current.job_if_any()
    if job is None or job.state_of(optimizer) is not None:
        return
    if _lamina.in_step() and _of_model(optimizer):
        current.everywhere("optimizer.step()")
    if optimizer in told:
        return
    told.add(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if (elsewhere := sum(map(_lamina.is_released, parameters))) > 0:
        warnings.warn(
            f"{type(optimizer).__name__} was not given to lamina.DistributedOptimizer: of its {len(parameters)} "
            f"parameters {elsewhere} live on other ranks, whose optimizers update them, and its state_dict() has a "
            "part of the state on each rank. optimizer = lamina.DistributedOptimizer(optimizer) saves and loads all",
            stacklevel=4,
        )


def _refuse_inputs(_: str, *given: Any, **__: Any) -> None:
    """autograd.grad(), and backward(inputs=...): torch gives what is asked for in the fifth place."""
    for tensor in given[4] if len(given) > 4 else ():
        if isinstance(tensor, torch.Tensor) and (where := _lamina.where_released(tensor)):
            raise refusal("gradient-elsewhere", where)
