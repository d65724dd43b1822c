# SPDX-License-Identifier: Apache-2.0
"""A call of a region, run again with whole layers and with slices: see [Note: proofs] in proofs.py."""

import contextvars
import functools
import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lamina import _lamina
from lamina.libraries import hugging_face
from lamina.model.shards import gathered_parameters
from lamina.proof import parts
from lamina.script_state.generators import Streams
from lamina.script_state.walk import Reach
from lamina.tensor_parallel import layers, partial
from lamina.tensor_parallel.layers import Slicing
from lamina.tensor_parallel.unslicing import make_plain
from lamina.torch_patches import module_call
from lamina.tracing.sandbox import Call, copied, outside_inference, put_stand_ins, undisturbed
from lamina.util import pytree

_NOISE = 0.1  # of a parameter's values
_LEAST_NOISE = 0.02
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_LARGE = 1 << 16  # elements of tensors that hooks may write, or that have an exchange of their own


@dataclass(frozen=True)
class Trained:
    """A parameter in a region.

    Attributes:
        name: in the region.
        module, key: whose it is.
        parameter: itself.
        slicing: None for a whole one.
        values: those that it has in a run with whole layers, and in one with slices.
    """

    name: str
    module: nn.Module
    key: str
    parameter: torch.Tensor
    slicing: Slicing | None
    values: dict[bool, torch.Tensor]


@dataclass
class Outcome:
    """The results of a run.

    Attributes:
        outputs: tensors that the region returned.
        beside: those that it has left in its modules or in what its code can reach, or handed to hooks of transformers,
            by name.
        written: those that it has left in its arguments, by name.
        of_inputs, of_parameters: gradients; None without.
        of_others: gradients of parameters that are in no module of the region, by their id, in the graph's order.
        has_drawn: whether random numbers were drawn.
    """

    outputs: list[torch.Tensor] = field(default_factory=list)
    beside: dict[str, torch.Tensor] = field(default_factory=dict)
    written: dict[str, torch.Tensor] = field(default_factory=dict)
    of_inputs: list[torch.Tensor | None] = field(default_factory=list)
    of_parameters: list[torch.Tensor | None] = field(default_factory=list)
    of_others: dict[int, torch.Tensor | None] = field(default_factory=dict)
    has_drawn: bool = False


Gradients = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Runs:
    """Runs of one call of a region, from the same inputs, values and random numbers. Nothing is left of them.

    Args:
        region: the module.
        session: of the job; None for runs with whole layers on this rank alone, from any values.
        args, kwargs: of the call.
        dtype: in which it is computed where types are smaller; None for the region's own.
        has_hooks: whether hooks of the script are called.

    Attributes:
        trained: the parameters.
    """

    def __init__(
        self,
        region: nn.Module,
        session: _lamina.Session | None,
        args: tuple,
        kwargs: dict[str, Any],
        dtype: torch.dtype | None,
        has_hooks: bool = True,
    ):
        self._has_hooks = has_hooks
        self._region, self._args, self._kwargs, self._dtype = region, args, kwargs, dtype
        self._given = {True: parts.wholes((args, kwargs)), False: parts.own((args, kwargs))}
        self._has_gradients = torch.is_grad_enabled()
        gathered = nullcontext() if session is None else gathered_parameters(list(region.parameters()))
        with gathered:
            self.trained = list(self._prepared(session))
        self._streams = Streams()
        self._reach: Reach | None = None  # of the region, where several runs may have one

    def run(
        self,
        whole: bool,
        gradients: Gradients | None,
        surroundings: AbstractContextManager[Any] | None = None,
        in_training: bool = True,
        added: partial.Partial = frozenset(),
    ) -> Outcome:
        """Runs it once.

        Args:
            whole: whether with whole layers.
            gradients: called with what the region returned, gives the gradients of that; None for no backward.
            surroundings: entered around the region's forward.
            in_training: False for one in evaluation.
            added: parameters whose gradients are added over the team.
        """
        region, found = self._region, Outcome()
        with self._sandbox(whole) as (stand_ins, reach), outside_inference(), partial.inside(added), _unkept():
            inputs: list[torch.Tensor] = []
            args, kwargs = copied(self._given[whole], lambda tensor: self._input(tensor, inputs))
            given = SideEffects([("its arguments", (args, kwargs))])
            for module in region.modules() if not in_training else ():
                module.__dict__["training"] = False
            with surroundings or nullcontext(), torch.set_grad_enabled(self._has_gradients):
                context = contextvars.copy_context()
                output, collected = context.run(_called, region, args, kwargs)
            found.outputs = pytree.tensors(output)
            found.written = given.found([])
            found.beside = collected | self._left_behind(stand_ins) | reach.found([*stand_ins.values(), *given.tensors])
            if self._has_gradients and gradients is not None:
                self._run_backward(found, inputs, stand_ins, gradients(found.outputs))
            found.has_drawn = self._streams.have_advanced()
        found.outputs = [each.detach() for each in found.outputs]
        found.beside = {name: each.detach() for name, each in found.beside.items()}
        found.written = {name: each.detach() for name, each in found.written.items()}
        return found

    def _prepared(self, session: _lamina.Session | None) -> Iterator[Trained]:
        slicings, found = layers.slicings(self._region), {}
        for path, module in self._region.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    found.setdefault(id(parameter), (f"{path}.{key}" if path else key, module, key, parameter))
        given = [(parameter.detach(), slicings.get(number)) for number, (*_, parameter) in found.items()]
        wholes = _wholes(given, session)
        for seed, (of, whole, (_, slicing)) in enumerate(zip(found.values(), wholes, given, strict=True), start=1):
            yield Trained(*of, slicing, self._values(whole, slicing, session, seed))

    def _values(
        self, whole: torch.Tensor, slicing: Slicing | None, session: _lamina.Session | None, seed: int
    ) -> dict[bool, torch.Tensor]:
        """A parameter's, with whole layers and with slices."""
        if session is None:
            return {True: whole}
        whole = _with_noise(self._converted(whole.clone()), seed)
        return {True: whole, False: whole if slicing is None else session.slice_of(whole, slicing)}

    @contextmanager
    def _sandbox(self, whole: bool) -> Iterator[tuple[dict[int, torch.Tensor], "SideEffects"]]:
        """Inside, the region has stand-ins for its tensors, by the id of each. Gives them, and what is left behind."""
        region = self._region
        stand_ins = {
            id(each.parameter): nn.Parameter(value := each.values[whole].clone(), value.is_floating_point())
            for each in self.trained
        }

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in stand_ins:
                stand_ins[id(tensor)] = self._converted(tensor.detach().clone())
            return stand_ins[id(tensor)]

        call = Call(self._args, self._kwargs)
        with undisturbed(region, call, self._reach) as reach, module_call.replaced((), {}):
            self._reach = reach if reach.is_repeatable else None
            left = SideEffects(reach)
            make_sliced = make_plain(region) if whole else lambda: None
            try:
                put_stand_ins(region, stand_in)
                for module in region.modules():
                    _hide_hooks(module, self._has_hooks)
                self._streams.restore()
                yield stand_ins, left
            finally:
                make_sliced()
                left.put_back()

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(torch.promote_types(tensor.dtype, self._dtype))

    def _input(self, tensor: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
        value = self._converted(tensor.detach().clone())
        if not (self._has_gradients and value.is_floating_point()):
            return value
        if not tensor.requires_grad:
            return value
        inputs.append(value.requires_grad_())
        return value.clone()  # which may be written

    def _left_behind(self, stand_ins: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Buffers that were written, and tensors that became attributes."""
        before = {id(each): each for each in stand_ins.values()}
        return {
            f"{path}.{name}" if path else name: value
            for path, module in self._region.named_modules()
            for name, value in [*vars(module).items(), *module._buffers.items()]
            if isinstance(value, torch.Tensor)
            and not isinstance(value, nn.Parameter)
            and (id(value) not in before or value._version > 0)
        }

    def _run_backward(
        self, found: Outcome, inputs: list[torch.Tensor], stand_ins: dict[int, torch.Tensor], given: list[torch.Tensor]
    ) -> None:
        leaves = inputs + [stand_ins[id(each.parameter)] for each in self.trained]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        beside = [each for _, each in sorted(found.beside.items())]
        results = [*zip(found.outputs, given, strict=True), *zip(beside, random_like(beside), strict=True)]
        pairs = [(output, by) for output, by in results if output.requires_grad]
        got: dict[int, torch.Tensor | None] = {}
        if pairs:
            total = torch.stack([(output * gradient).sum().real.double() for output, gradient in pairs]).sum()
            others = [each for each in _leaves(total) if not any(each is leaf for leaf in wanted)]
            every = [*wanted, *others]
            with _lamina.Unguarded():
                gradients = torch.autograd.grad(total, every, allow_unused=True) if every else ()
            got = {id(leaf): gradient for leaf, gradient in zip(every, gradients, strict=True)}
            found.of_others = {id(each): got[id(each)] for each in others}
        found.of_inputs = [got.get(id(each)) for each in inputs]
        found.of_parameters = [got.get(id(stand_ins[id(each.parameter)])) for each in self.trained]


def _wholes(values: list[tuple[torch.Tensor, Slicing | None]], session: _lamina.Session | None) -> list[torch.Tensor]:
    """Whole values of these; any ones without a session. Small ones are put together in one exchange."""
    shapes = [value.shape if slicing is None else layers.unsliced(value.shape, slicing) for value, slicing in values]
    if session is None:
        pairs = zip(values, shapes, strict=True)
        return [torch.full(shape, _LEAST_NOISE, dtype=each.dtype, device=each.device) for (each, _), shape in pairs]
    wholes, small = [value for value, _ in values], defaultdict(list)
    for number, (value, slicing) in enumerate(values):
        if slicing is not None and math.prod(shapes[number]) <= _LARGE:
            small[value.dtype, value.device].append(number)
        elif slicing is not None:
            wholes[number] = session.whole_of(value, slicing)
    for numbers in small.values():
        own = torch.cat([_among_zeros(*values[number], shapes[number], session) for number in numbers])
        together = torch.ops.lamina.tp_all_reduce(own, session.team())
        for number, whole in zip(numbers, together.split([math.prod(shapes[each]) for each in numbers]), strict=True):
            wholes[number] = whole.view(shapes[number])
    return wholes


def _among_zeros(value: torch.Tensor, slicing: Slicing, shape: list[int], session: _lamina.Session) -> torch.Tensor:
    """The whole as one row, with zeros for what the other ranks have."""
    whole = torch.zeros(math.prod(shape), dtype=value.dtype, device=value.device)
    places = session.slice_of(torch.arange(len(whole), device=value.device).view(shape), slicing)
    with _lamina.Unguarded():
        return whole.index_copy_(0, places.flatten(), value.flatten())


class NoDropout(TorchFunctionMode):
    """Inside, nothing is dropped."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in (functional.dropout, torch.ops.lamina.tp_dropout):
            return args[0] if args else kwargs["input"]
        ours = (torch.ops.lamina.attention, torch.ops.lamina.tp_attention)
        if function in (functional.scaled_dot_product_attention, *ours):
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs = kwargs | {"dropout_p": 0.0}
        return function(*args, **kwargs)


def _called(region: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The result of a call, and what transformers' hooks have collected in it."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    asked = (capturing and capturing._active_collector.get()) or ()
    kept: dict[str, list[Any]] = defaultdict(list, {key: [] for key in asked})
    if asked:
        capturing._active_collector.set(kept)
    output = region.forward(*args, **kwargs)
    collected = {f"{key} {number}": each for key, found in kept.items() for number, each in enumerate(found)}
    return output, {name: each for name, each in collected.items() if isinstance(each, torch.Tensor)}


class SideEffects:
    """Tensors that a run leaves behind in what a walk has found.

    Args:
        reached: the walk, or objects where one begins, with names.
    """

    def __init__(self, reached: Reach | list[tuple[str, Any]]):
        self._reach = reached if isinstance(reached, Reach) else Reach(reached)
        self.tensors = list(self._reach.tensors)
        self._versions = [each._version for each in self.tensors]
        self._values = [
            each.detach().clone() if _may_be_written(each) and isinstance(reached, Reach) else None
            for each in self.tensors
        ]

    def found(self, known: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors that are there now, and were not, or were written; none of those that are known."""
        before = {id(each) for each in [*self.tensors, *known]}
        found: dict[str, torch.Tensor] = {}
        for number, (name, _, was, now) in enumerate(self._reach.changed()):
            for key, value in now.items():
                if key in was and was[key] is value:
                    continue
                for place, each in enumerate(pytree.tensors(value)):
                    if id(each) not in before and not isinstance(each, nn.Parameter):
                        found[f"{name} {key} {number} {place}"] = each
        for number, (each, version) in enumerate(zip(self.tensors, self._versions, strict=True)):
            if each._version != version and not isinstance(each, nn.Parameter):
                found[f"tensor {number}"] = each
        return found

    def put_back(self) -> None:
        """Tensors have the values again that they had."""
        for each, version, value in zip(self.tensors, self._versions, self._values, strict=True):
            if value is not None and each._version != version:
                each.data.copy_(value)


def _may_be_written(tensor: torch.Tensor) -> bool:
    is_plain = not isinstance(tensor, nn.Parameter) and not tensor.is_meta and not _lamina.is_released(tensor)
    return is_plain and tensor.numel() <= _LARGE


def _leaves(total: torch.Tensor) -> list[torch.Tensor]:
    """The leaves of a graph, in its order."""
    found, seen, ahead = [], set(), [total.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        ahead += [each for each, _ in node.next_functions]
    return found


def random_like(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Random numbers of these shapes and types, always the same."""
    found = []
    for number, each in enumerate(tensors):
        generator = torch.Generator().manual_seed(number)
        found.append(torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each))
    return found


def _unkept() -> AbstractContextManager[None]:
    """Inside, what is kept for backwards is not seen by activation checkpointing around."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def hooks(region: nn.Module) -> int:
    """How many hooks of the script modules of a region have."""
    return sum(
        not is_ours(hook) for module in region.modules() for name in _HOOKS for hook in vars(module)[name].values()
    )


def _hide_hooks(module: nn.Module, has_hooks: bool) -> None:
    """Hooks of lamina's own are not called. transformers' collect what is compared, and torch's compute weights."""
    for name in _HOOKS:
        found = module.__dict__[name].items()
        module.__dict__[name] = OrderedDict(
            (key, hook) for key, hook in found if _is_library(hook) or (has_hooks and not is_ours(hook))
        )


def _is_library(hook: Any) -> bool:
    return hugging_face.is_collector(hook) or type(hook).__module__.startswith("torch.nn.utils.")


def is_ours(hook: Any) -> bool:
    """True for a hook of lamina's own."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__self__", hook)
    own = getattr(hook, "__module__", None) or type(hook).__module__
    return own.partition(".")[0] == "lamina" and not hugging_face.is_collector(hook)


def _with_noise(value: torch.Tensor, seed: int) -> torch.Tensor:
    """A value that is no constant, nor tiny: a parameter that begins with zeros or ones would hide how it is used."""
    if not value.is_floating_point() or value.numel() == 0:
        return value
    size = value.double().square().mean().sqrt().item()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value)
    return value + noise * max(size * _NOISE, _LEAST_NOISE)
