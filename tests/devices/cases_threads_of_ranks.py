# SPDX-License-Identifier: Apache-2.0
"""Where modules of four ranks compute: on their rank's device, on the stream on which the step was entered, and a
backward in the thread that began it."""

import os
import threading

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lamina

OWN = torch.device("emulated", int(os.environ.get("LOCAL_RANK", 0)))


class Place:
    """Where a rank has computed: devices and streams, by what it did. Each rank has its own, as of an object of a
    library's."""

    __module__ = "torch"

    def __init__(self):
        self.found, self.lock = {}, threading.Lock()

    def note(self, what):
        here = torch.accelerator.current_device_index(), torch.accelerator.current_stream().stream_id
        with self.lock:
            self.found.setdefault(what, set()).add(here)


place = Place()


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        place.note("forward")
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        place.note("backward")
        return 2 * gradient


class Derived(nn.Linear):
    """Takes a derivative in its forward, through other ranks' modules where it has some."""

    def __init__(self, width, inner=None):
        super().__init__(width, width)
        self.inner = inner

    def forward(self, x):
        assert x.device.type == "cpu" or not torch._C._is_multithreading_enabled()
        y = Noted.apply(super().forward(x)).tanh()
        return y if self.inner is None else self.inner(y)


class Recomputed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        def compute(x):
            place.note("recomputation" if torch._C._current_graph_task_id() >= 0 else "forward")
            return self.inner(x)

        return checkpoint(compute, x, use_reentrant=False)


class Slope(nn.Module):
    """Adds the derivative of what its module gives."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if not torch.is_grad_enabled():
            return self.inner(x)
        given = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(given).sum(), given)
        return self.inner(x) + slope


def build():
    torch.manual_seed(0)
    inner = Derived(6)
    return nn.Sequential(Recomputed(Derived(6, inner)), Slope(Derived(6)), Recomputed(Derived(6))).double(), inner


def case_modules_compute_on_the_stream_of_the_step_and_backwards_stay_in_their_thread():
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain, _ = build()
    (plain(batch).square().mean()).backward()
    expected = {name: each.grad.clone() for name, each in plain.named_parameters()}
    place.found.clear()

    lamina.init(partitions=4, microbatches=2, auto_partition=False, default_partition=0, timeout_s=60)
    net, inner = build()
    for partition, module in ((1, net[0].inner), (2, inner), (3, net[1]), (0, net[1].inner), (1, net[2])):
        lamina.set_partition(module, partition)
    model = lamina.DistributedModel(net)

    @lamina.step
    def train(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    side = torch.Stream(OWN)
    torch.accelerator.set_stream(side)
    try:
        train(batch.to(OWN))
        gradients = {name: each.grad.cpu() for name, each in model.local_named_parameters()}
    finally:
        torch.accelerator.set_stream(torch.Stream(stream_id=0, device_index=OWN.index, device_type=side.device_type))
    here = OWN.index, side.stream_id
    of_step = {what: places - {(OWN.index, 0)} for what, places in place.found.items()}  # a trace is on the default one
    assert all(places <= {here} for places in of_step.values()), place.found
    everywhere = set().union(*lamina.allgather(set(of_step), lamina.WORLD))
    assert everywhere >= {"forward", "backward", "recomputation"}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12, msg=name)
