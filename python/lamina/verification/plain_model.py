# SPDX-License-Identifier: Apache-2.0
"""The plain model of a job, for one microbatch: see [Note: step check] in lamina/session/step_check.h."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError
from lamina.job import current
from lamina.model.partitioned import named_tensors
from lamina.modules.tree import ModuleTree
from lamina.script_state.generators import Streams
from lamina.tensor_parallel import unslicing
from lamina.torch_patches import module_call, sequential
from lamina.tracing.sandbox import Call, alias, copied, put_stand_ins, undisturbed
from lamina.util import pytree


class PlainModel:
    """A microbatch of the model as if it were not cut: its tensors have stand-ins, which have their values. The engine
    says when it runs.

    Args:
        tree: the model's modules.
        call: of the model.
        streams: torch's random numbers then.
    """

    def __init__(self, tree: ModuleTree, call: Call, streams: Streams):
        self._tree, self._call, self._streams = tree, call, streams
        self._run: _lamina.PlainRun | None = None
        self._values: _lamina.PlainValues | None = None
        self._stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id, with whose it is
        self._returned: list[torch.Tensor] = []

    def run_forward(self, run: _lamina.PlainRun, values: _lamina.PlainValues | None) -> str:
        """Calls the model.

        Args:
            run: records it.
            values: of what is not here; None before anything is cut.

        Returns:
            Why it failed; "" where it did not.
        """
        self._run, self._values = run, values
        return _failure(self._call_model)

    def run_backward(self, gradients: dict[int, torch.Tensor]) -> str:
        """Runs the backward, which may call modules again.

        Args:
            gradients: of what the model returned, by number.

        Returns:
            Why it failed; "" where it did not.
        """
        return _failure(functools.partial(self._run_backward, gradients))

    def _call_model(self) -> None:
        named = named_tensors(self._tree.root)
        given = {} if self._values is None else self._values.tensors
        for name, tensor in named:
            self._add(tensor, given.get(name, tensor))
        trained = [(name, self._stand_in(tensor)) for name, tensor in named if isinstance(tensor, nn.Parameter)]
        self._run.watch(trained)
        with self._in_place():
            args, kwargs = copied((self._call.args, self._call.kwargs), alias)
            self._streams.restore()
            self._returned = pytree.tensors(self._call.of(self._tree.root, args, kwargs))

    def _run_backward(self, gradients: dict[int, torch.Tensor]) -> None:
        returned, self._returned = self._returned, []
        pairs = [(output, gradients.get(number)) for number, output in enumerate(returned)]
        reached = [(output, gradient) for output, gradient in pairs if gradient is not None and output.requires_grad]
        if reached:
            with self._in_place():
                torch.autograd.backward(*map(list, zip(*reached, strict=True)))

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        tree, call = self._tree, self._call
        with undisturbed(tree.root, call) as reach:
            kept = [tensor for tensor in reach.tensors if id(tensor) not in self._stand_ins]
            with _values_kept(kept), call.surroundings():
                self._put_attributes()
                make_sliced = unslicing.make_plain(tree.root)
                put_stand_ins(tree.root, self._stand_in)
                try:
                    with _lamina.AsInBody(), sequential.plainly(), _all_here(), _recorded(tree, self._run):
                        yield
                finally:
                    make_sliced()

    def _put_attributes(self) -> None:
        """Gives modules those that they have on their owners."""
        modules = dict(zip(self._tree.names, self._tree.modules, strict=True))
        for name, value in ({} if self._values is None else self._values.attributes).items():
            module, _, attribute = name.rpartition(".")
            vars(modules[module])[attribute] = value

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._stand_ins:
            self._add(tensor, tensor)
        return self._stand_ins[id(tensor)][1]

    def _add(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if value.is_meta or _lamina.is_released(value):
            raise UsageError("a tensor of it has no value here")
        copy = value.detach().to(tensor.device, copy=True)  # the memory goes with the cut
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, tensor.requires_grad)
            copy._backward_hooks = tensor._backward_hooks
        self._stand_ins[id(tensor)] = tensor, copy


def _failure(run: Callable[[], None]) -> str:
    """Runs it; returns why that failed."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def _all_here() -> Iterator[None]:
    """Modules may do as on one rank, with stand-ins of theirs."""
    model = current.job().partitioned_model
    if model is None:
        yield
        return
    model.is_called_plainly = True
    try:
        yield
    finally:
        model.is_called_plainly = False


@contextmanager
def _values_kept(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Gives those of these tensors that are written their values back."""
    strided = [each for each in tensors if each.layout is torch.strided]
    here = [each for each in strided if not each.is_meta and not _lamina.is_released(each)]
    kept = [(each, each.detach().clone()) for each in here]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


@contextmanager
def _recorded(tree: ModuleTree, plain: _lamina.PlainRun) -> Iterator[None]:
    """Calls of modules of the tree are recorded, in the streams of random numbers that they have in a step."""

    def begin(node: int, _remote: bool, given: tuple) -> _lamina.HookedCall:
        return plain.begin(node, pytree.tensors(given))

    filled = tree.filled()
    streamed = itertools.compress(tree.modules, [number in filled.starting_stream for number in filled.ids])
    hooked = {id(module): functools.partial(begin, node) for node, module in enumerate(tree.modules)}
    with module_call.replaced(list(streamed), hooked):
        yield
