# SPDX-License-Identifier: Apache-2.0
"""A model as a tree of modules: a walk that fills the engine's, which is in lamina/model/module_tree.h."""

import ctypes
import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.nn.utils import parametrize

from lamina import _lamina
from lamina.errors import UsageError
from lamina.modules import dynamic, placement, rng_streams
from lamina.tensor_parallel import layers

_OWN = "torch.nn.modules."
# They read the parameters of their children without calling them, or call them out of our sight.
_INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, torch.jit.ScriptModule)
# Never called: what they hold belongs to the module that reads it.
_PARAMETER_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


class ModuleTree:
    """The modules under a root that can be owned, each once, parents before children.

    Attributes:
        modules, names, parents: per node; the root is node 0, has the name "" and the parent -1.
    """

    def __init__(self, root: nn.Module):
        self.root = root
        filled = self.filled()
        self._parts = {id(part): part for part in root.modules()}  # kept, so that their ids stay theirs
        self._home_of: dict[int, int] = filled.homes
        self.modules: list[nn.Module] = [self._parts[number] for number in filled.ids]
        self.names: list[str] = filled.names
        self.parents: list[int] = filled.parents

    def node(self, module: nn.Module) -> int | None:
        """The number of a module of the tree, or of the node that it is part of; None for any other."""
        return self._home_of.get(id(module))

    def filled(self) -> _lamina.ModuleTree:
        """The engine's tree of the modules as they are now.

        Errors:
            UsageError: a parameter or buffer has no shape yet.
        """
        tree = _lamina.ModuleTree()
        for path, module in self.root.named_modules(remove_duplicate=False):
            is_part = isinstance(module, _PARAMETER_CONTAINERS)
            tree.add(
                path,
                id(module),
                type(module).__qualname__,
                "part" if is_part else "called" if is_called(module) else "container",
                _tensors(module),
                indivisible=is_part or isinstance(module, _INDIVISIBLE) or parametrize.is_parametrized(module),
                same_everywhere=_is_same_everywhere(module),
                draws=rng_streams.may_draw(module),
                dynamic=dynamic.is_dynamic(module),
                keeps_statistics=dynamic.keeps_statistics(module),
                placed_at=placement.of(module),
            )
        return tree

    def require_unchanged(self, is_cut: bool) -> None:
        """Raises UsageError where a module was put into the model since; `is_cut`: over several ranks."""
        begun = ("it was cut", "its first step") if is_cut else ("lamina.DistributedModel was made", "that")
        for path, module in self.root.named_modules():
            if id(module) not in self._home_of:
                raise UsageError(
                    f"{path} came into the model after {begun[0]}, and other ranks know nothing of it: change a model "
                    f"before {begun[1]}",
                    code="model-grown",
                )

    def constants(self) -> dict[str, str]:
        """Tensors that modules hold in attributes, and that are neither parameters nor buffers: nobody sends it."""
        return {
            f"{name}.{attribute}" if name else attribute: hashlib.sha256(_bytes(value)).hexdigest()
            for name, module in self.root.named_modules()
            for attribute, value in vars(module).items()
            if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta
        }

    def hidden_modules(self) -> dict[str, str]:
        """Modules that a list, a tuple or a dictionary in an attribute holds, and the model does not: by the name of
        the attribute a digest of their values, which nobody sends."""
        found, own = {}, self._parts.keys()
        for name, module in self.root.named_modules():
            for attribute, value in vars(module).items():
                if attribute.startswith("_") or not isinstance(value, (list, tuple, set, frozenset, dict)):
                    continue
                hidden = [each for each in _modules_in(value) if id(each) not in own]
                tensors = [tensor for each in hidden for tensor in (*each.parameters(), *each.buffers())]
                if any(tensor.is_meta or tensor.layout is not torch.strided for tensor in tensors):
                    continue
                digest = hashlib.sha256()
                for tensor in tensors:
                    digest.update(_bytes(tensor))
                if tensors:
                    found[f"{name}.{attribute}" if name else attribute] = digest.hexdigest()
        return found


def _modules_in(value: object, depth: int = 4) -> Iterator[nn.Module]:
    """The modules in a container of Python's, with those inside."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset, dict)) and depth:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(each, depth - 1)


def is_called(module: nn.Module) -> bool:
    """True where it has a forward; lists and dictionaries of modules have none."""
    # Looked up as it is: a ScriptModule's cannot be had from its class.
    forward = next(vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))
    return forward is not nn.Module.forward or "forward" in module.__dict__


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor, bool, bool, Sequence[int]]]:
    """(name, tensor, whether it is a buffer, whether it has a shape, the shape of the whole of which it is a slice) of
    what is its own."""
    return [
        (name, tensor, is_buffer, not isinstance(tensor, UninitializedTensorMixin), layers.whole_shape(module, name))
        for is_buffer, held in enumerate((module._parameters, module._buffers))
        for name, tensor in held.items()
        if tensor is not None
    ]


def _is_same_everywhere(module: nn.Module) -> bool:
    """True where a call of it on any rank is the same, if it holds nothing: of other classes than torch's that is not
    known, nor with hooks."""
    altered = rng_streams.is_altered(module) or module._backward_hooks or module._backward_pre_hooks
    return type(module).__module__.startswith(_OWN) and not altered


def _bytes(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().cpu().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b""
