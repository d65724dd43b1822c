# SPDX-License-Identifier: Apache-2.0
"""Batches that lie on the host, for one rank or two: a script that names no device trains as one that moves them."""

import emulated
import pytest
import torch
from torch import nn
from torch.nn import functional

import lamina
from lamina.job.ranks import size

LAYOUTS = [{}, {"ddp": True}] if size() == 1 else [{"partitions": 2}, {"ddp": True}]


class Training:
    """A model that trains in steps of four microbatches; `seen` are the devices of what bodies were given."""

    def __init__(self, **layout):
        lamina.init(microbatches=4, timeout_s=60, **layout)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.model, self.seen = lamina.distribute(model), set()
        self.optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 0.1))
        self.step = lamina.step(self.body)

    def body(self, x, batch):
        self.seen |= {x.device, batch["of"].device}
        loss = functional.cross_entropy(self.model(x), batch["of"])
        self.model.backward(loss)
        return loss

    def losses(self, place, steps=3):
        numbers = torch.Generator().manual_seed(lamina.dp_rank())
        found = []
        for _ in range(steps):
            x = torch.randn(8, 6, generator=numbers, dtype=torch.float64)
            of = torch.randint(3, (8,), generator=numbers)
            self.optimizer.zero_grad()
            loss = self.step(x.to(place), {"of": of.to(place), "named": "text", "count": 3})
            self.optimizer.step()
            found.append(loss.reduce_mean())
        return [loss.item() for loss in found]


def case_a_batch_of_the_host_goes_to_the_ranks_device():
    for layout in LAYOUTS:
        found = {}
        for place in ("host", "device"):
            training = Training(**layout)
            found[place] = training.losses("cpu" if place == "host" else lamina.device())
            assert training.seen <= {lamina.device()}, training.seen
            lamina.shutdown()
        assert found["host"] == pytest.approx(found["device"], rel=1e-12), "microbatches come in any order"
        assert len(set(found["host"])) == 3


def case_what_is_not_split_stays_where_it_is():
    lamina.init(microbatches=2)
    seen = []

    @lamina.step(non_split_inputs=["total"])
    def step(x, total, number):
        seen.append((x.device.type, total.device.type, number))
        total += 1
        return x.sum()

    total = torch.zeros(())
    assert step(torch.ones(4), total, 7).reduce_sum().item() == 4
    assert total == 2 * (lamina.pp_rank() == 0)
    assert seen == [("emulated", "cpu", 7)] * 2


def case_microbatches_that_the_script_has_cut_go_there():
    lamina.init(microbatches=2)

    @lamina.step
    def step(x):
        assert {each.device for each in x} == {lamina.device()}
        return sum(each.sum() for each in x)

    pieces = [[torch.ones(3), torch.ones(2)], [torch.ones(5), torch.ones(1)]]
    assert [each.item() for each in step(lamina.Microbatches(pieces)).outputs] == [5, 6]


def case_a_model_outside_of_steps_takes_a_batch_of_the_host():
    for layout in LAYOUTS:
        training = Training(**layout)
        training.losses("cpu", 1)
        x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        training.model.eval()
        with torch.no_grad():
            there, here = training.model(x), training.model(x.to(lamina.device()))
        assert there.device == lamina.device() and torch.equal(there, here)
        lamina.shutdown()


def case_a_batch_may_be_written_to_once_the_step_has_been_called():
    lamina.init(microbatches=2)

    @lamina.step
    def step(x):
        return x.sum()

    for _ in range(10):
        x = torch.ones(1 << 16)
        emulated.reset_counts()
        found = step(x).reduce_sum()
        assert emulated.counts()["waits"] == 0
        x.fill_(3)
        assert found.item() == 1 << 16


def case_pinned_batches_are_the_scripts_to_write_to_at_once():
    """While the device is still busy with what came before."""
    lamina.init(microbatches=2, timeout_s=60, **LAYOUTS[-1])
    device = lamina.device()
    x, busy = torch.ones(1 << 14, 4).pin_memory(), torch.ones(1 << 14, 4, device=device)
    for _ in range(20):
        busy = busy * 1.0

    @lamina.step
    def doubled(x):
        return 2 * x

    found = doubled(x)
    x.fill_(3)
    assert torch.equal(found.concat().cpu(), torch.full((1 << 14, 4), 2.0))
