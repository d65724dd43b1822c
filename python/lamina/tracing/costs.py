# SPDX-License-Identifier: Apache-2.0
"""The cost of an operation on a nominal device, from its arguments alone: the same on every machine.

A device computes and moves memory at once, so an operation takes as long as the slower of both, and never less than it
takes to start it. An exchange of slices with other ranks takes the time of a message of the bytes that a rank sends.
What counts are ratios between modules; times of a real device come from `times`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from lamina import _lamina

_BACKWARD_OF_ATTENTION = 2.5  # flash attention computes the scores once more
# Bytes that a rank of a team sends in an operator of lamina/tensor_parallel/operators.h, forward and backward, as
# multiples of the whole's other parts.
_SENT = {
    "tp_copied": (0, 2),
    "tp_all_reduce": (2, 0),
    "tp_gather": (1, 0),
    "tp_scatter": (0, 1),
    "tp_all_gather": (1, 1),
    "tp_reduce_scatter": (1, 1),
    "tp_all_to_all": (1, 1),
}


@dataclass(frozen=True)
class Device:
    """Speeds of a device.

    Attributes:
        flops_per_us, bytes_per_us: of large operations.
        start_us: of the smallest operation.
        link_bytes_per_us, link_start_us: of messages between ranks.
    """

    flops_per_us: float
    bytes_per_us: float
    start_us: float
    link_bytes_per_us: float
    link_start_us: float

    def exchange_us(self, sent_bytes: float) -> float:
        return self.link_start_us + sent_bytes / self.link_bytes_per_us if sent_bytes else 0.0

    def time_us(self, flops: float, moved_bytes: float) -> float:
        return self.start_us + max(flops / self.flops_per_us, moved_bytes / self.bytes_per_us)


CPU = Device(flops_per_us=4e4, bytes_per_us=1e4, start_us=4, link_bytes_per_us=2e3, link_start_us=60)
GPU = Device(flops_per_us=1e8, bytes_per_us=1.5e6, start_us=5, link_bytes_per_us=2e5, link_start_us=20)


def nominal(device: torch.device) -> Device:
    """The speeds that stand for a device of that type."""
    return CPU if device.type in ("cpu", "meta") else GPU


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operation."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


def times_us(
    device: Device,
    operation: Any,
    args: tuple,
    kwargs: dict[str, Any],
    output: Any,
    of_parameters: Callable[[torch.Tensor], bool],
) -> tuple[float, float, float]:
    """Forward and backward time of one operation, and of the latter the weight part: what only gradients of parameters
    need. All are 0 for operations that only look at memory in another way.

    Args:
        device: it runs on.
        operation, args, kwargs, output: it.
        of_parameters: whether a tensor is a parameter, or was computed of nothing but these.
    """
    if operation.namespace == "lamina":
        return *_exchange_times_us(device, operation, args, output), 0.0
    if operation.is_view or operation.namespace == "prim":
        return 0.0, 0.0, 0.0
    inputs = list(tensors_of((*args, *kwargs.values())))
    outputs = list(tensors_of((output,)))
    moved_bytes = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
    flops = _flops(operation, args, kwargs, output)
    forward_us = device.time_us(flops, moved_bytes)
    trained = [t for t in inputs if t.requires_grad]
    if not trained or not torch.is_grad_enabled():
        return forward_us, 0.0, 0.0
    if "attention" in operation.name():
        return forward_us, device.time_us(_BACKWARD_OF_ATTENTION * flops, 2 * moved_bytes), 0.0
    # One product for the gradient of each factor; a bias takes a sum. Elementwise gradients come in one pass.
    factors = [t for t in trained if t.dim() > 1] if flops else []
    backward_us = max(len(factors), 1) * device.time_us(flops, moved_bytes)
    if all(map(of_parameters, trained)):
        return forward_us, backward_us, backward_us
    return forward_us, backward_us, backward_us * sum(map(of_parameters, factors)) / max(len(factors), 1)


def _exchange_times_us(device: Device, operation: Any, args: tuple, output: Any) -> tuple[float, float]:
    """Forward and backward time of an operator of slices; what it returns has its gradient in mind, or not."""
    given = args[0]
    forward, backward = _SENT.get(operation.overloadpacket.__name__, (0, 0))
    whole = max(each.numel() * each.element_size() for each in tensors_of((given, output)))
    others = whole * (1 - 1 / _lamina.team_size(args[-1])) if forward or backward else 0
    times = (device.exchange_us(forward * others), device.exchange_us(backward * others))
    return times if given.requires_grad else (times[0], 0.0)


def _flops(operation: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> float:
    count = flop_registry.get(operation.overloadpacket)
    if count is not None:
        return count(*args, **kwargs, out_val=output)
    if "scaled_dot_product" in operation.name() and "backward" not in operation.name():
        return sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
    return 0
