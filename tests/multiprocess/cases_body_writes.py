# SPDX-License-Identifier: Apache-2.0
"""Cases of what a step body writes outside of it, for two ranks that are one pipeline."""

import functools
import random
import threading
import warnings

import numpy as np
import pytest
import torch
from multiprocess.cases_tracing import BATCH, RANK, start
from torch import nn

import lamina


class Meter:
    """An average, as scripts have it."""

    of_class = 0

    def __init__(self):
        self.sum = self.count = 0
        self.values = []

    def update(self, value, count):
        self.sum, self.count = self.sum + value * count, self.count + count
        self.values.append(value)
        Meter.of_class += 1

    @property
    def average(self):
        return self.sum / max(self.count, 1)


class Slotted:
    __slots__ = ("last",)


seen_globally = 0
best = {"loss": float("inf")}


def layers():
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])


def case_what_a_body_writes_is_written_on_all_ranks():
    global seen_globally
    model, meter, losses, graph, table = start(layers()), Meter(), [], [], torch.zeros(2)
    array, slotted, count, given = np.zeros(2), Slotted(), 0, Meter()

    @lamina.step
    def train(x, meter_given):
        global seen_globally
        nonlocal count
        loss = model(x).square().mean()
        model.backward(loss)
        meter.update(loss.item(), len(x))
        meter_given.update(loss.item(), 1)
        losses.append(loss.detach())
        graph.append(loss)
        best["loss"] = min(best["loss"], loss.item())
        table[count % 2] = array[count % 2] = loss.item()
        slotted.last = {"rows": len(x)}
        count, seen_globally = count + 1, seen_globally + 1
        return loss

    for _ in range(2):
        outputs = [each.item() for each in train(BATCH, given).outputs]
        found = [meter.average, len(meter.values), given.average, Meter.of_class, best["loss"], count, seen_globally]
        found += [table.tolist(), array.tolist(), slotted.last, [each.item() for each in losses], len(graph)]
        assert lamina.allgather(found, lamina.WORLD) == [found, found]
        assert found[0] == pytest.approx(sum(outputs) / 2)
        meter.__init__()  # as scripts do between epochs, on all ranks
        losses.clear()
    assert count == 4 and [type(each) for each in losses] == [] and len(graph) == 4
    seen_globally, best["loss"], Meter.of_class = 0, float("inf"), 0


def case_generators_from_which_a_body_draws_are_alike_on_all_ranks():
    model = start(layers())
    drawn = random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)
    random.seed(1)
    np.random.seed(1)

    def draw():
        numbers = [drawn[0].random(), drawn[1].random(), torch.rand((), generator=drawn[2]).item()]
        return sum([*numbers, random.random(), np.random.random()])

    @lamina.step
    def train(x, store, log, totals):
        model.backward(loss := model(x).square().mean() * draw())
        store[0] += 1
        log.append(store[0])
        totals["count"] = totals.get("count", 0) + 1
        return loss

    for _ in range(2):
        train(BATCH, store := bytearray(1), log := [], totals := {})
        assert store == b"\2" and log == [1, 2] and totals == {"count": 2}
    mine = draw()
    assert lamina.allgather(mine, lamina.WORLD) == [mine] * 2


class LibrarysMetric(nn.Module):
    """As of a package for metrics: it has a method in an attribute."""

    def __init__(self):
        super().__init__()
        self.total, self.compute = torch.zeros(()), self.whole

    def update(self, value):
        self.total = self.total + value

    def whole(self):
        return self.total.item()


def case_metrics_of_a_package_are_alike_on_all_ranks():
    model, metric = start(layers()), LibrarysMetric()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lamina.pipeline.around._is_a_librarys", lambda held: type(held) is LibrarysMetric)

        @lamina.step
        def train(x):
            model.backward(loss := model(x).square().mean())
            metric.update(loss.detach())
            return loss

        total = train(BATCH).reduce_sum().item()
    assert lamina.allgather(metric.compute(), lamina.WORLD) == [total] * 2


def case_a_partial_function_is_a_step_function():
    model, found = start(layers()), []

    def train(scale, x):
        model.backward(loss := model(x).square().mean() * scale)
        found.append(scale)
        return loss

    step = lamina.step(functools.partial(train, 2.0))
    assert len(step(BATCH).outputs) == len(found) == 2
    with pytest.raises(lamina.UsageError, match="train has no argument 'y'"):
        lamina.step(functools.partial(train, 2.0), non_split_inputs=["y"])


class Holder:
    """An object of the script."""


class Trainer:
    """A step that is a method, of an object that has the model, too."""

    def __init__(self, model):
        self.model, self.history, self.lock = model, [], threading.Lock()

    @lamina.step
    def train(self, x):
        loss = self.model(x).square().mean()
        self.model.backward(loss)
        self.history.append((len(self.history), loss.item()))
        return loss


def case_the_object_of_a_method_is_as_on_the_rank_that_leads():
    trainer = Trainer(start(layers()))
    for _ in range(2):
        trainer.train(BATCH)
    assert [at for at, _ in trainer.history] == [0, 1, 2, 3]
    assert lamina.allgather(trainer.history, lamina.WORLD) == [trainer.history] * 2


def case_what_cannot_be_written_there_is_told_once():
    model, holder = start(layers(), microbatches=1), Holder()

    @lamina.step
    def train(x):
        holder.lock, holder.number = threading.Lock(), len(x)
        return model(x).sum()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            train(BATCH)
    lines = [str(each.message) for each in told if "return it from the step function" in str(each.message)]
    assert ["holder.lock" in line for line in lines] == ([True] if RANK == 0 else [])
    assert holder.number == 8, "on both ranks"
