# SPDX-License-Identifier: Apache-2.0
"""Modules that torch.compile has put into wrappers: in a model of lamina's they are compiled in place, and names are
those of the plain model."""

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from lamina.modules import placement
from lamina.torch_patches import compiled

_WRAPPED = "_orig_mod"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def in_place(root: nn.Module) -> nn.Module:
    """The model with such modules in the place of their wrappers, as after their own method `compile`. A wrapper that
    has hooks of its own stays."""
    known: dict[nn.Module, nn.Module] = {}
    for module in list(root.modules()):
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _unwrapped(child, known)
    return _unwrapped(root, known)


def require_no_graphs(root: nn.Module) -> None:
    """UsageError where a module of a model was compiled to be replayed as a graph of an accelerator: see
    `compiled.refuse_graphs`."""
    for name, module in root.named_modules():
        call = module if _is_wrapper(module) else module._compiled_call_impl
        settings = getattr(call, "get_compiler_config", None)
        if settings is not None:
            compiled.refuse_graphs(f"`{name}` of the model" if name else "the model", settings())


def in_plain_names(state: Mapping[str, Any], root: nn.Module) -> Mapping[str, Any]:
    """A state that may be of a model with wrappers, for one that has none."""
    if not any(_is_of_wrapper(name) for name in state) or any(map(_is_wrapper, root.modules())):
        return state
    named = OrderedDict((_plain(name), value) for name, value in state.items())
    if (metadata := getattr(state, "_metadata", None)) is not None:
        named._metadata = {_plain(name): value for name, value in metadata.items()}
    return named


def _unwrapped(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    if not _is_wrapper(module) or any(module.__dict__[hooks] for hooks in _HOOKS):
        return module
    if module not in known:
        known[module] = original = module._modules[_WRAPPED]
        original._compiled_call_impl = module.dynamo_ctx(original._call_impl)
        placement.carry(module, original)
    return _unwrapped(known[module], known)


def _is_wrapper(module: nn.Module) -> bool:
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # torch imports it with the first wrapper
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def _is_of_wrapper(name: Any) -> bool:
    return isinstance(name, str) and _WRAPPED in name.split(".")


def _plain(name: Any) -> Any:
    return ".".join(part for part in name.split(".") if part != _WRAPPED) if _is_of_wrapper(name) else name
