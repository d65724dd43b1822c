# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training on a device that is late: they have the values of their call."""

import contextlib
import tempfile

import emulated
import torch
from torch import nn

import lamina

SAVES = 20


class Training:
    """A weight and its optimizer's states, which are of other tensors after a load."""

    def __init__(self):
        lamina.init()
        self.model = lamina.DistributedModel(nn.Linear(64, 64, bias=False).to("emulated"))
        self.torchs = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self.optimizer = lamina.DistributedOptimizer(self.torchs)
        (self.weight,) = self.model.parameters()

        @lamina.step
        def run(x):
            self.model.backward(self.model(x).sum())

        run(torch.ones(1, 64, device="emulated"))
        self.optimizer.step()
        torch.accelerator.synchronize()  # for cases that go on with another stream

    def values(self, states=True):
        state = self.torchs.state[self.weight]
        return [self.weight, *((state["exp_avg"], state["exp_avg_sq"]) if states else ())]

    def fill(self, number):
        with torch.no_grad():
            for each in self.values():
                each.fill_(number)

    def compute(self):
        with torch.no_grad():
            for _ in range(10):
                self.weight.add_(1)

    def has(self, number, states=True):
        return all(bool((each == number).all()) for each in self.values(states))


def case_saves_go_after_what_the_training_has_computed():
    training, side, stale = Training(), torch.Stream("emulated"), []
    for number in range(SAVES):
        with side, tempfile.TemporaryDirectory() as folder:
            training.compute()  # late, so that a save that waits for another stream finds less
            training.fill(number)
            lamina.save_checkpoint(folder, "now", partial=number % 2 == 0)
            training.fill(-1)
            lamina.resume_from_checkpoint(folder, "now", partial=number % 2 == 0)
            if not training.has(number, states=number % 2 == 0):
                stale.append(number)
    assert not stale, f"{len(stale)} of {SAVES} saves are older than the training"


def case_saves_beside_training_have_the_values_of_their_call_and_nobody_waits_for_the_device():
    training, side, wrong = Training(), torch.Stream("emulated"), []
    for number in range(SAVES):
        on = side if number % 3 == 0 else contextlib.nullcontext()
        with on, tempfile.TemporaryDirectory() as folder:
            training.compute()
            training.fill(number)
            waits = emulated.counts()["waits"]
            save = lamina.save_checkpoint(folder, "now", partial=number % 2 == 0, asynchronous=True)
            training.fill(-1)
            save.wait()
            assert emulated.counts()["waits"] == waits, number
            lamina.resume_from_checkpoint(folder, "now", partial=number % 2 == 0)
            if not training.has(number, states=number % 2 == 0):
                wrong.append(number)
    assert not wrong, f"{len(wrong)} of {SAVES} saves have other values than those of their call"


def case_a_save_beside_training_takes_no_memory_of_the_device():
    training = Training()
    for _ in range(2):
        torch.accelerator.synchronize()
        emulated.reset_counts()
        with tempfile.TemporaryDirectory() as folder:
            lamina.save_checkpoint(folder, "now", asynchronous=True).wait()
        assert emulated.counts()["peak_bytes"] == emulated.counts()["bytes"]
    del training
