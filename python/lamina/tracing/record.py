# SPDX-License-Identifier: Apache-2.0
"""Follows one forward of a model, operation by operation, and notes what each module costs and does."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.libraries import hugging_face
from lamina.modules.tree import ModuleTree
from lamina.tensor_parallel import regions
from lamina.torch_patches import scoped
from lamina.tracing.costs import Device, tensors_of, times_us
from lamina.tracing.route import Stretch, Way, size_bytes
from lamina.tracing.state import StateWatch
from lamina.util import pytree

_READS_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_SLOW_S = 10


class WritesParameterError(Exception):
    """A forward writes to a parameter: executing it for a trace would change the model."""


class RunsBackwardError(Exception):
    """A forward runs a backward of its own, and what was saved for it was not kept."""


@dataclass
class Measures:
    """Facts known of a module, for one microbatch, without the modules that it calls.

    Attributes:
        forward_us, backward_us: times.
        exchange_us: of these, the exchanges of slices with other ranks.
        activation_bytes: kept for the backward, parameters not counted.
        output_bytes: of what it returns, all calls together.
        order: when it was first called, None when it was not.
        calls: how often it was called.
        reads: nodes whose parameters or buffers it reads itself.
        ties: nodes with which it shares attributes.
        stretches: its times by what it did before, between and after the calls that it made.
        reads_data, draws: whether data decides what it does; whether it draws random numbers.
    """

    forward_us: float = 0.0
    backward_us: float = 0.0
    exchange_us: tuple[float, float] = (0.0, 0.0)
    activation_bytes: int = 0
    output_bytes: int = 0
    order: int | None = None
    calls: int = 0
    reads: set[int] = field(default_factory=set)
    ties: set[int] = field(default_factory=set)
    reads_data: bool = False
    draws: bool = False
    stretches: list[Stretch] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """A dispatch mode around one call of the model.

    Args:
        tree: the model's, with the tensors in its place that the call will see.
        device: whose times are noted.
        state: is told of calls and operations.
        protect: whether writes to parameters raise WritesParameterError, before they happen.
        keep: whether what is saved for the backward is kept, for forwards that run backwards of their own.
        tell: told once when it takes long.
        written: tensors beside the model's own that may be written: they get their values back.
    """

    def __init__(
        self,
        tree: ModuleTree,
        device: Device,
        state: StateWatch,
        protect: bool,
        keep: bool,
        tell: Callable[[str], None],
        written: Sequence[torch.Tensor] = (),
    ):
        super().__init__()
        self.measures = [Measures() for _ in tree.modules]
        self._tree = tree
        self._batches = regions.batches(tree.modules)  # that a module computes with, where a call has one
        self._device = device
        self._state = state
        self._keep = keep
        self._saved: list[torch.Tensor] = []  # for the backward; its graph would hold itself by them
        self._tell = tell
        self._began = time.monotonic()
        self._told = False
        self._way = Way([each.stretches for each in self.measures])
        self._stack: list[int] = []
        self._recomputed = 0  # depth of modules that run once more in their backward
        self.failed_in: int | None = None
        self._holders = Holders(tree)
        strided = [tensor for tensor in self._holders.tensors if tensor.layout is torch.strided]
        self._counted = {(storage := _storage(tensor)).cdata: storage for tensor in strided}
        parameters = [tensor for tensor in self._holders.tensors if protect and isinstance(tensor, nn.Parameter)]
        self._protected = {_storage(parameter).cdata for parameter in parameters}
        self._weights = {_storage(each) for each in strided}  # and what is computed of nothing but these
        self._outside = {_storage(each).cdata: each for each in written if each.layout is torch.strided}
        self._before: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []  # what was written, and its value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        node = self.node()
        measures = self.measures[node]
        inputs = list(tensors_of((*args, *kwargs.values())))
        for tensor in inputs:
            held_by = self._holders.of(tensor)
            if held_by and node not in held_by:
                measures.reads.add(min(held_by))
        written = list(tensors_of(_written(func, args, kwargs))) if func._schema.is_mutable else []
        self._see_to_writes(written)
        self._state.operation(inputs, written)
        if any(tag in func.tags for tag in _READS_DATA):
            measures.reads_data = True
        measures.draws = measures.draws or _draws(func, args)
        output = func(*args, **kwargs)
        batches = self._batches[node]
        forward_us, backward_us, weights_us = (
            batches * each for each in times_us(self._device, func, args, kwargs, output, self._of_parameters)
        )
        if func.namespace == "lamina":
            measures.exchange_us = (measures.exchange_us[0] + forward_us, measures.exchange_us[1] + backward_us)
        measures.forward_us += forward_us
        backward_us += forward_us if self._recomputed else 0
        measures.backward_us += backward_us
        if func.namespace != "prim":
            outputs = list(tensors_of((output,)))
            if inputs and all(map(self._of_parameters, inputs)):
                self._weights.update(_storage(each) for each in outputs if each.layout is torch.strided)
            self._way.work(node, inputs, (forward_us, backward_us, weights_us))
            self._way.made((*outputs, *written))
        return output

    def node(self) -> int:
        """The node whose forward runs."""
        return self._stack[-1] if self._stack else 0

    @contextmanager
    def watching(self, saved: bool = True) -> Iterator[None]:
        """Inside, calls of modules are noted and, unless not `saved`, what is saved for their backward."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if saved else nullcontext()
        with scoped.calls(self._call), hooks, self:
            try:
                yield
            finally:
                self._saved.clear()
                self._holders.tensors.clear()
                for written, before in self._before:
                    written.copy_(before)

    def _call(self, original: Callable, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        node = self._tree.node(module)
        if node is None:
            return original(module, *args, **kwargs)
        self._tell_when_slow()
        measures, inside = self.measures[node], node in self._stack[-1:]
        if measures.order is None:
            measures.order = sum(each.order is not None for each in self.measures)
        args, kwargs = self._given(args), self._given(kwargs)
        recomputed = hasattr(module.__dict__.get("forward"), "preserve_rng_state")
        if not inside:
            self._way.enter(node, (args, kwargs))
        self._state.enter(node)
        self._stack.append(node)
        self._recomputed += recomputed
        try:
            output = self._given(forward_of(module, args, kwargs))
        except BaseException:
            self.failed_in = node if self.failed_in is None else self.failed_in
            raise
        finally:
            self._stack.pop()
            self._state.leave()
            self._recomputed -= recomputed
        if not inside:
            self._way.leave(output)
            measures.calls += 1
            measures.output_bytes += size_bytes(pytree.tensors(output))
        return output

    def _given(self, values: Any) -> Any:
        """A parameter given to a module, or by it, is a value there and no reading of the parameter."""
        return pytree.map_tensors(lambda t: t.view_as(t) if self._holders.of(t) else t, values)

    def _pack(self, tensor: torch.Tensor) -> int | None:
        storage = _storage(tensor) if tensor.layout is torch.strided else None
        if storage is not None and storage.cdata not in self._counted:
            self._counted[storage.cdata] = storage
            self.measures[self.node()].activation_bytes += (
                self._batches[self.node()] * tensor.untyped_storage().nbytes()
            )
        if not self._keep:
            return None
        self._saved.append(tensor)
        return len(self._saved) - 1

    def _unpack(self, place: int | None) -> torch.Tensor:
        if place is None:
            raise RunsBackwardError("it runs a backward in its forward")
        return self._saved[place]

    def _of_parameters(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and _storage(tensor) in self._weights

    def _see_to_writes(self, written: list[torch.Tensor]) -> None:
        for tensor in written if self._protected or self._outside else ():
            if tensor.layout is not torch.strided:
                continue
            if (number := _storage(tensor).cdata) in self._protected:
                raise WritesParameterError("it writes to a parameter in its forward")
            if self._outside.pop(number, None) is not None:
                self._before.append((tensor.untyped_storage(), tensor.untyped_storage().clone()))

    def _tell_when_slow(self) -> None:
        if not self._told and time.monotonic() - self._began > _SLOW_S:
            self._told = True
            seen = sum(each.order is not None for each in self.measures)
            self._tell(f"tracing the model takes long: {seen} of {len(self.measures)} modules so far")


class Holders:
    """Which nodes hold a tensor as a parameter or buffer of their own."""

    def __init__(self, tree: ModuleTree):
        self.tensors: list[torch.Tensor] = []
        self._nodes: dict[int, set[int]] = {}
        for part in tree.root.modules():
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None:
                    self.tensors.append(tensor)
                    self._nodes.setdefault(id(tensor), set()).add(tree.node(part))

    def of(self, tensor: torch.Tensor) -> set[int] | None:
        return self._nodes.get(id(tensor))


def calls_all_hooks(root: nn.Module) -> bool:
    """True where `forward_of` leaves out no hook of any module of a model."""
    everywhere = nn.modules.module
    return not (everywhere._global_forward_pre_hooks or everywhere._global_forward_hooks) and all(
        all(map(_is_torchs, module._forward_pre_hooks.values()))
        and len(module._forward_hooks) == len(hugging_face.collectors(module))
        for module in root.modules()
    )


def forward_of(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The module without the script's hooks, which may count. Hooks of torch's own are called, for they compute
    weights, and so are Hugging Face's, for they collect the model's results."""
    for hook in list(module._forward_pre_hooks.values()):
        if _is_torchs(hook):
            hook(module, args)
    output = module.forward(*args, **kwargs)
    for hook in hugging_face.collectors(module):
        hook(module, args, output)
    return output


def _is_torchs(hook: Callable) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils.")


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes in place."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def _draws(func: Any, args: tuple) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    # Attention has dropout built in, which mostly is off.
    return "attention" not in func.name() or any(isinstance(each, float) and each > 0 for each in args[3:5])


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """Names a tensor's memory, as long as the result is kept; it keeps no memory itself."""
    return StorageWeakRef(tensor.untyped_storage())
