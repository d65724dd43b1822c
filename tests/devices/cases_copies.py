# SPDX-License-Identifier: Apache-2.0
"""Tensors between two ranks whose devices are late. Readers see neither what was there before, nor what was written
after."""

import copy
import gc
import math
import time

import emulated
import pytest
import torch
from torch import nn

import lamina

MICROBATCHES, ROWS, WIDTH = 2, 4, 8


class Part(nn.Module):
    """Fails where it is told to."""

    fails = False

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(x).tanh()
        if self.fails:
            raise ValueError("a part that fails")
        return y * 2


class Spoils(Part):
    """Writes to what it has returned, where it is told to."""

    def forward(self, x, spoils=False):
        if spoils:
            self.held.fill_(-1)
            return x * 1
        result = super().forward(x)
        self.held = result.detach()
        return result


class Same(nn.Module):
    """Gives back what it is given."""

    def forward(self, x):
        return x * 1


def parts():
    torch.manual_seed(0)
    return nn.ModuleDict({"here": Part(), "there": Part(), "spoils": Spoils(), "same": Same()})


class Training:
    """A step of `body(parts, x)` over two ranks, and `plain`, else the same, on the host. All parts but "here" are rank
    1's."""

    def __init__(self, body, plain=None, **keys):
        lamina.shutdown()
        placed = {"partitions": 2, "auto_partition": False, "default_partition": 0}
        lamina.init(microbatches=MICROBATCHES, timeout_s=60, **placed, **keys)
        whole = parts()
        self.body, self.plain_body, self.plain = body, plain or body, copy.deepcopy(whole)
        for name, part in whole.items():
            lamina.set_partition(part, 0 if name == "here" else 1)
        self.model = lamina.distribute(whole)
        self.parts = self.model.module
        self.batch = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))

        @lamina.step
        def run(x):
            loss = self.body(self.parts, x)
            self.model.backward(loss)
            return loss

        self.run = run

    def step(self):
        self.model.zero_grad()
        return self.run(self.batch.to(lamina.device(), non_blocking=True))

    def check(self):
        """Requires of a step what the host gives: a NaN comes from memory that was let go of."""
        self.plain.zero_grad()
        losses = [self.plain_body(self.plain, each) for each in self.batch.chunk(MICROBATCHES)]
        (sum(losses) / MICROBATCHES).backward()
        loss = self.step().reduce_mean()
        torch.testing.assert_close(loss.cpu(), sum(losses).detach() / MICROBATCHES)
        for name, parameter in self.model.local_named_parameters():
            expected = self.plain.get_parameter(name).grad
            assert (parameter.grad is None) == (expected is None), name
            if expected is not None:
                torch.testing.assert_close(parameter.grad.cpu(), expected, msg=lambda text, name=name: name + text)


def passed_on(parts, x):
    return parts["there"](parts["here"](x)).square().mean()


def writes_after_a_call(parts, x):
    given = parts["here"](x) * 1
    found = parts["there"](given)
    with torch.no_grad():
        given.fill_(-1)
    return found.square().mean()


def writes_after_a_return(parts, x):
    found = parts["spoils"](x) * 1  # read before: to what is read later nobody may write
    other = parts["spoils"](x, spoils=True)
    return found.square().mean() + other.mean()


def writes_nothing_after_a_return(parts, x):
    return parts["spoils"](x).square().mean() + x.mean()


def drops(parts, x):
    parts["there"](x)
    parts["same"](parts["there"](x))
    return parts["here"](x).square().mean()


def case_what_is_written_right_after_a_call_or_a_return_does_not_reach_the_receiver():
    pairs = ((writes_after_a_call, passed_on), (writes_after_a_return, writes_nothing_after_a_return))
    for body, plain in pairs:
        training = Training(body, plain, active_microbatches=1)  # each has what the part holds to itself
        for _ in range(4):
            training.check()


def case_a_result_may_be_read_first_on_another_stream():
    def reads_beside(parts, x):
        found = parts["there"](parts["here"](x))
        if found.device.type == "cpu":
            return found.square().mean()
        side = torch.Stream("emulated")
        side.wait_stream(torch.accelerator.current_stream())  # for results that are there already
        with torch.no_grad(), side:
            beside = found + 0
        torch.accelerator.current_stream().wait_stream(side)
        seen.append((beside, found.detach().clone()))
        return found.square().mean()

    seen = []
    training = Training(reads_beside)
    for _ in range(4):
        training.check()
    assert lamina.rank() > 0 or len(seen) == 4 * MICROBATCHES
    for beside, found in seen:
        assert torch.equal(beside.cpu(), found.cpu())


SIZES = ((0,), (1,), (64, 1 << 20), (3, 0, 2), (5, 7))


def case_tensors_of_any_size_go_there_and_back():
    def there_and_back(parts, x):
        for size in SIZES:
            given = torch.full(size, 3, dtype=torch.uint8, device=x.device)
            found = parts["same"](given)
            given.fill_(9)
            same.append((found.shape == given.shape) & (found == 3).all())
        return parts["here"](x).square().mean()

    same = []
    training = Training(there_and_back)
    for _ in range(2):
        training.step()
    assert all(bool(each) for each in same)
    assert lamina.rank() > 0 or len(same) == 2 * MICROBATCHES * len(SIZES)


def live_bytes(training, at_most=0):
    """The bytes of this rank's device between steps, when all has passed and nothing of a later step comes.

    They are the fewest within a while, for the transport's threads let go of what they have sent when they come to it.
    The while ends with `at_most` bytes."""
    training.model.zero_grad()
    lamina.barrier()
    gc.collect()
    torch.accelerator.synchronize()
    found, until = math.inf, time.monotonic() + (5 if at_most else 0.2)
    while found > at_most and time.monotonic() < until:
        found = min(found, emulated.counts()["bytes"][lamina.device().index])
        time.sleep(0.01)
    lamina.barrier()
    return found


def require_no_more(training, before, when=""):
    """Requires as few live bytes as there were, or fewer: on a busy machine something was still on its way then."""
    found = live_bytes(training, before)
    assert found <= before, f"{found} bytes live, before {before} {when}"


def case_results_that_nobody_reads_leave_nothing():
    training = Training(drops)
    for _ in range(3):
        training.check()
    before = live_bytes(training)
    for _ in range(5):
        training.check()
        require_no_more(training, before)


def case_steps_that_fail_leave_nothing():
    training = Training(passed_on)
    for _ in range(3):
        training.check()
    before = live_bytes(training)
    for name in ("there", "here") * 2:
        part = training.parts[name]
        part.fails = True
        with pytest.raises(ValueError, match="a part that fails"):
            training.step()
        part.fails = False
        require_no_more(training, before, name)
        training.check()
        require_no_more(training, before, name)
