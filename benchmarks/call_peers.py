# SPDX-License-Identifier: Apache-2.0
"""The peers that call_overhead.py puts beside lamina's remote call: torch's own means, each called by both ranks."""

import torch
import torch.distributed as dist
from measure import each_us
from torch.distributed import autograd, rpc


def of_gloo(x: torch.Tensor, count: int) -> dict[str, float]:
    """A tensor from rank 0 to rank 1 and back."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    received = torch.empty_like(x)

    def there_and_back():
        if rank == 0:
            dist.send(x, other)
        dist.recv(received, other)
        if rank == 1:
            dist.send(received, other)

    return {"torch gloo: send and recv": each_us(there_and_back, count)}


def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Runs on rank 1 for rank 0."""
    return x * weight


def of_rpc(x: torch.Tensor, count: int) -> dict[str, float]:
    """rank 0 calls `scale`; rank 1 serves it from threads of its own, so there this returns at once."""
    weight = torch.ones(1, requires_grad=True)

    def call_and_backward():
        with autograd.context() as context:
            y = rpc.rpc_sync("rank1", scale, (x.detach().requires_grad_(), weight))
            autograd.backward(context, [y.sum()])

    if dist.get_rank() != 0:
        return {}
    call = each_us(lambda: rpc.rpc_sync("rank1", scale, (x, weight.detach())), count)
    return {"torch rpc: call": call, "torch rpc: call and backward": each_us(call_and_backward, count)}
