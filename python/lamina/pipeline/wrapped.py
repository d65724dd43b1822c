# SPDX-License-Identifier: Apache-2.0
"""A module around another, which is taken for that one."""

import contextlib
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lamina.deferred_init.delayed import is_delayed
from lamina.errors import UsageError
from lamina.job import current
from lamina.util.checks import require_module

Names = Iterator[tuple[str, Any]]


class as_in_wrapped:  # noqa: N801 -- a decorator
    """A `forward` of a WrappedModule, whose signature is that of the wrapped module's."""

    def __init__(self, function: types.FunctionType):
        functools.update_wrapper(self, function)
        self._function = function

    def __get__(self, wrapper: "WrappedModule | None", kind: type) -> Any:
        if wrapper is None:
            return self._function
        signed = vars(wrapper).get("_signed")
        if signed is None:
            signed = vars(wrapper)["_signed"] = _signed_as(self._function, wrapper.module.forward)
        return types.MethodType(signed, wrapper)


class WrappedModule(nn.Module):
    """A module whose parameters, buffers and modules have the names that they have in the one it wraps.

    Libraries ask models who they are (`isinstance(model, PreTrainedModel)`, `model.config`, the name of a class, the
    signature of `forward`), and do something else with a stranger. So it is an instance of the wrapped module's class,
    too, and has all attributes of that, to read and to set; methods are the wrapped module's.

    Args:
        module: the one that is wrapped, which `require_wrappable` has passed.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    @property
    def __class__(self) -> type:
        module = vars(self).get("_modules", {}).get("module")
        return type(self) if module is None else type(module)

    def __getattr__(self, name: str) -> Any:
        modules = vars(self).get("_modules", {})
        if name in modules:
            return modules[name]
        if "module" not in modules or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(modules["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        modules = vars(self).get("_modules", {})
        is_own = "module" not in modules or name in vars(self) or name in modules or hasattr(type(self), name)
        if is_own or not hasattr(modules["module"], name):
            super().__setattr__(name, value)
        else:
            setattr(modules["module"], name, value)

    def __repr__(self) -> str:
        return type(self).__name__ + super().__repr__().removeprefix(self._get_name())

    def get_module(self) -> nn.Module:
        """The module that is wrapped."""
        return self.module

    def named_modules(self, memo: set | None = None, prefix: str = "", remove_duplicate: bool = True) -> Names:
        """As the wrapped module's."""
        return self.module.named_modules(memo, prefix, remove_duplicate)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Names:
        """As the wrapped module's: all parameters, those without a value on this rank included."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Names:
        """As the wrapped module's: all buffers, those without a value on this rank included."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)


def require_wrappable(module: Any) -> nn.Module:
    """The module. UsageError for what is none, or one that is inside or around another wrapper."""
    require_module(module, "DistributedModel")
    if isinstance(module, WrappedModule):
        raise UsageError("this is a DistributedModel already")
    if isinstance(module, torch.jit.ScriptModule) and current.job().pipelined:
        raise UsageError(
            "the whole model is one ScriptModule, which cannot be cut: script or trace parts of it instead",
            code="model-scripted",
        )
    for name, part in module.named_modules():
        if isinstance(part, _torch_wrappers()):
            what = f"`{name}` in the model" if name else "the model"
            raise UsageError(
                f"{what} is a {type(part).__name__} of torch's, and lamina sees to data parallelism itself: "
                + _without(name, part),
                code="model-wrapped",
            )
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_meta and not is_delayed(tensor):
            raise UsageError(
                f"{name} of the model is on the meta device, where nothing has a value: {_with_values(module)}",
                code="model-meta",
            )
    return module


def _signed_as(function: types.FunctionType, forward: Any) -> types.FunctionType:
    """A copy of a method whose signature is that of a bound one, where that has any."""
    parts = function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copied = functools.update_wrapper(types.FunctionType(*parts), function)
    own = inspect.Parameter("_wrapper", inspect.Parameter.POSITIONAL_ONLY)
    with contextlib.suppress(TypeError, ValueError):  # of what is compiled
        copied.__signature__ = inspect.Signature([own, *inspect.signature(forward).parameters.values()])
    return copied


def _with_values(module: nn.Module) -> str:
    """Says how a model gets values where it has none."""
    if any("_hf_hook" in vars(part) for part in module.modules()):
        return "accelerate offloads it; accelerate.hooks.remove_hook_from_submodules(model) brings it back"
    return (
        'first model.to_empty(device="cpu") and its values, or load_state_dict(state, assign=True); to build a large '
        "model without its memory, lamina.delay_param_initialization()"
    )


def _without(name: str, wrapper: nn.Module) -> str:
    """Says how a model is without one of torch's wrappers, which is that part of it."""
    if "module" not in wrapper._modules:  # fully_shard() gives a module another class
        return "make the model without that"
    return f"put `{name}.module`, which it wraps, into its place" if name else "give its `.module`, which it wraps"


def _torch_wrappers() -> tuple[type, ...]:
    """torch's own data-parallel modules; nobody has one of FSDP without its import, which takes long."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers = [getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name)]
    return (nn.parallel.DistributedDataParallel, nn.DataParallel, *wrappers)
