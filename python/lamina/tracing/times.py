# SPDX-License-Identifier: Apache-2.0
"""How long each module takes, forward and backward, on a device: the model is run a few times. What other processes
take of the host's processors does not count."""

import bisect
import functools
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lamina._lamina import OwnClock
from lamina.modules.tree import ModuleTree
from lamina.tensor_parallel import regions
from lamina.torch_patches import scoped
from lamina.tracing.record import Holders, Measures, forward_of
from lamina.tracing.sandbox import Call, copied, moved, put_stand_ins, undisturbed
from lamina.util import pytree

_RUNS = 4  # the first, which finds caches cold, does not count
_ENOUGH_S = 10


def measure_times(tree: ModuleTree, call: "Call", device: torch.device | None, measures: list[Measures]) -> None:
    """Puts the time that each node took into `measures`: the shortest of a few runs. One rank runs alone: exchanges of
    slices keep the time that was counted for them."""
    began, batches = time.perf_counter(), regions.batches(tree.modules)
    runs = []
    while len(runs) < _RUNS and (len(runs) < 2 or time.perf_counter() - began < _ENOUGH_S):
        runs.append(_run(tree, call, device))
    for node, each in enumerate(measures):
        each.forward_us = batches[node] * min(run.forward_us[node] for run in runs[1:]) + each.exchange_us[0]
        each.backward_us = batches[node] * min(run.backward_us[node] for run in runs[1:]) + each.exchange_us[1]


def _run(tree: ModuleTree, call: "Call", device: torch.device | None) -> "_Stopwatch":
    with undisturbed(tree.root, call), call.surroundings():
        make = moved(device)
        put_stand_ins(tree.root, make)
        args, kwargs = copied((call.args, call.kwargs), make)
        watch = _Stopwatch(tree, device)
        with watch.forward():
            output = call.of(tree.root, args, kwargs)
        watch.backward(output)
    return watch


class _Stopwatch:
    """Time per node. In the forward it belongs to the innermost module; the graph's nodes are numbered as they are
    made, so that each belongs to the module that ran then."""

    def __init__(self, tree: ModuleTree, device: torch.device | None):
        self.forward_us = [0.0] * len(tree.modules)
        self.backward_us = [0.0] * len(tree.modules)
        self._tree = tree
        self._holders = Holders(tree)
        has_streams = device is not None and device.type != "cpu"
        self._clock = OwnClock()
        self._wait = functools.partial(torch.accelerator.synchronize, device) if has_streams else lambda: None
        self._stack: list[int] = [0]
        self._since = 0.0
        self._marks: list[tuple[int, int]] = []  # (number of the next node of the graph, node of the tree)

    @contextmanager
    def forward(self):
        with scoped.calls(self._call):
            self._since = self._clock.now_us()
            self._mark()
            yield
            self._pass_time()

    def backward(self, output: Any) -> None:
        """Runs the backward of everything that the model returned."""
        roots = [tensor for tensor in pytree.tensors(output) if tensor.requires_grad]
        for function in _graph([tensor.grad_fn for tensor in roots]):
            self._time(function)
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(tensor) for tensor in roots])

    def _call(self, original: Callable, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        node = self._tree.node(module)
        if node is None:
            return original(module, *args, **kwargs)
        self._pass_time()
        self._stack.append(node)
        self._mark()
        try:
            return forward_of(module, args, kwargs)
        finally:
            self._pass_time()
            self._stack.pop()
            self._mark()

    def _pass_time(self) -> None:
        self._wait()
        now = self._clock.now_us()
        self.forward_us[self._stack[-1]] += now - self._since
        self._since = now

    def _mark(self) -> None:
        self._marks.append((torch._C._autograd._get_sequence_nr(), self._stack[-1]))

    def _time(self, function: Any) -> None:
        node, began = self._node_of(function), 0.0

        def begins(_: Any) -> None:
            nonlocal began
            self._wait()
            began = self._clock.now_us()

        def ends(*_: Any) -> None:
            self._wait()
            self.backward_us[node] += self._clock.now_us() - began

        function.register_prehook(begins)
        function.register_hook(ends)

    def _node_of(self, function: Any) -> int:
        variable = getattr(function, "variable", None)
        if variable is not None:  # it adds to a gradient
            return min(self._holders.of(variable) or {0})
        place = bisect.bisect_right(self._marks, function._sequence_nr(), key=lambda mark: mark[0])
        return self._marks[max(place - 1, 0)][1]


def _graph(roots: list[Any]) -> list[Any]:
    found, ahead = {}, [root for root in roots if root is not None]
    while ahead:
        function = ahead.pop()
        if function not in found:
            found[function] = None
            ahead += [following for following, _ in function.next_functions if following is not None]
    return list(found)
