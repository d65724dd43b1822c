# SPDX-License-Identifier: Apache-2.0
"""A model as a tree of modules, numbered alike on every rank."""

import ctypes
import hashlib

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.nn.utils import parametrize

from lamina.errors import UsageError
from lamina.modules import placement

# They read the parameters of their children without calling them, or call them out of our sight: all of one lives
# together.
_INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, torch.jit.ScriptModule)
# Never called: what they hold belongs to the module that reads it.
_PARAMETER_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


class ModuleTree:
    """The modules under a root that can be owned, each once, parents before children.

    Attributes:
        modules, names, parents: per node; the root is node 0, has the name "" and the parent -1.
        held: per node, the modules whose own parameters and buffers are the node's: it, and what it cannot part from.
    """

    def __init__(self, root: nn.Module):
        self.root = root
        self.modules: list[nn.Module] = []
        self.names: list[str] = []
        self.parents: list[int] = []
        self.held: list[list[nn.Module]] = []
        self._node_of: dict[int, int] = {}  # by id(module)
        self._add(root, "", -1, 0)
        _refuse_uninitialized(root)

    def node(self, module: nn.Module) -> int | None:
        """The number of a module of the tree, None for any other."""
        return self._node_of.get(id(module))

    def rows(self) -> list[dict[str, object]]:
        """Per node what a plan is made from; see `Session.plan`."""
        number: dict[int, int] = {}  # by id(parameter)
        rows = []
        for node, (module, held) in enumerate(zip(self.modules, self.held, strict=True)):
            own = {id(p): p for part in held for p in part._parameters.values() if p is not None}
            rows.append(
                {
                    "id": node,
                    "parent": self.parents[node],
                    "name": self.names[node],
                    "parameter_bytes": sum(p.numel() * p.element_size() for p in own.values()),
                    "parameter_ids": [number.setdefault(key, len(number)) for key in own],
                    "callable": is_called(module),
                    "placed_at": placement.of(module),
                }
            )
        return rows

    def paths(self) -> dict[str, int]:
        """The node of every module, under each name it has; modules inseparable from a node have its number.

        Errors:
            UsageError: a module was put into the model since.
        """
        paths = {}
        for path, module in self.root.named_modules(remove_duplicate=False):
            if id(module) not in self._node_of:
                raise UsageError(
                    f"{path} came into the model after it was cut: change a model before its first step",
                    code="model-grown",
                )
            paths[path] = self._node_of[id(module)]
        return paths

    def tensors(self) -> list[tuple[str, torch.Tensor, int]]:
        """(name, tensor, node) of every parameter, then of every buffer, each once."""
        paths = self.paths()
        named = [*self.root.named_parameters(), *self.root.named_buffers()]
        return [(name, tensor, paths[name.rpartition(".")[0]]) for name, tensor in named]

    def describe(self) -> list[str]:
        """One line per module, parameter and buffer: equal lists, equal structure."""
        lines = [f"module {name!r}: {type(module).__qualname__}" for name, module in self.root.named_modules()]
        lines += [f"tensor {name!r}: {_kind(tensor)}" for name, tensor, _ in self.tensors()]
        return lines

    def constants(self) -> dict[str, str]:
        """Tensors that modules hold in attributes, and that are neither parameters nor buffers: nobody sends it."""
        return {
            f"{name}.{attribute}" if name else attribute: hashlib.sha256(_bytes(value)).hexdigest()
            for name, module in self.root.named_modules()
            for attribute, value in vars(module).items()
            if type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
        }

    def _add(self, module: nn.Module, name: str, parent: int, home: int) -> None:
        """Adds `module` and what is under it; `home` is the nearest node above that is called."""
        node = len(self.modules)
        self._node_of[id(module)] = node
        self.modules.append(module)
        self.names.append(name)
        self.parents.append(parent)
        self.held.append([module])
        if isinstance(module, _INDIVISIBLE) or parametrize.is_parametrized(module):
            self._hold(module, node)
            return
        home = node if is_called(module) else home
        for child_name, child in module.named_children():
            if id(child) in self._node_of:
                continue
            if isinstance(child, _PARAMETER_CONTAINERS):
                self._node_of[id(child)] = home
                self.held[home].append(child)
                self._hold(child, home)
            else:
                self._add(child, f"{name}.{child_name}" if name else child_name, node, home)

    def _hold(self, module: nn.Module, node: int) -> None:
        for part in module.modules():
            if id(part) not in self._node_of:
                self._node_of[id(part)] = node
                self.held[node].append(part)


def is_called(module: nn.Module) -> bool:
    """True where it has a forward; lists and dictionaries of modules have none."""
    # Looked up as it is: a ScriptModule's cannot be had from its class.
    forward = next(vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))
    return forward is not nn.Module.forward or "forward" in module.__dict__


def _bytes(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b""


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}, {tensor.dtype}"


def _refuse_uninitialized(root: nn.Module) -> None:
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        if isinstance(tensor, UninitializedTensorMixin):
            raise UsageError(
                f"{name} has no shape yet (a lazy module): run the model once on an example before it is distributed",
                code="model-lazy",
            )
