# SPDX-License-Identifier: Apache-2.0
import collections
import datetime
import math
import warnings

import pytest
import torch
from torch.optim import lr_scheduler

from lamina.errors import ConfigError
from lamina.trainer import State, Timestamp
from lamina.trainer import schedulers as ours

BATCHES = 7  # of an epoch
SAMPLES = 4  # of a batch


def at(batch, duration="4ep", length=BATCHES, tokens=True):
    state = State(None, "run", 0)
    state.max_duration, state.dataloader_len, state.counts_tokens = duration, length, tokens
    epoch, inside = divmod(batch, BATCHES)
    seconds = datetime.timedelta(seconds=0.5 * batch)
    state.timestamp = Timestamp(
        epoch=epoch, batch=batch, sample=SAMPLES * batch, token=10 * batch, batch_in_epoch=inside, total_wct=seconds
    )
    return state


def values(schedule, batches=4 * BATCHES + 3, **options):
    return [schedule(at(batch, **options)) for batch in range(batches)]


def of_torch(make, batches=4 * BATCHES + 3):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(batches):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ours.StepScheduler("3ba", 0.5), lambda o: lr_scheduler.StepLR(o, 3, 0.5)),
        (ours.StepScheduler("1ep"), lambda o: lr_scheduler.StepLR(o, BATCHES)),
        (ours.MultiStepScheduler(["2ba", "1ep", "0.5dur"]), lambda o: lr_scheduler.MultiStepLR(o, [2, 7, 14])),
        (ours.ConstantScheduler(0.3, "5ba"), lambda o: lr_scheduler.ConstantLR(o, 0.3, 5)),
        (ours.LinearScheduler(0.2, 0.9, "2ep"), lambda o: lr_scheduler.LinearLR(o, 0.2, 0.9, 14)),
        (ours.LinearScheduler(), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, 28)),
        (ours.ExponentialScheduler(0.9, "1ba"), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        (ours.PolynomialScheduler(2.0), lambda o: lr_scheduler.PolynomialLR(o, 28, 2.0)),
        (
            ours.CosineAnnealingWarmRestartsScheduler("4ba", 2.0, 0.1),
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2, 0.1),
        ),
    ],
)
def test_schedules_are_those_of_torch(ours, theirs):
    assert values(ours) == pytest.approx(of_torch(theirs), rel=1e-9, abs=1e-9)


def test_a_cosine_stays_at_its_end():
    expected = of_torch(lambda o: lr_scheduler.CosineAnnealingLR(o, 28, 0.1), 29)
    found = values(ours.CosineAnnealingScheduler("1dur", 0.1))
    assert found[:29] == pytest.approx(expected, rel=1e-9) and found[29:] == [0.1, 0.1]


WARMED = {
    ours.LinearWithWarmupScheduler: ({"alpha_i": 0.8, "alpha_f": 0.2}, 0.8, lambda part: 0.8 - 0.6 * part),
    ours.ConstantWithWarmupScheduler: ({"alpha": 0.7}, 0.7, lambda part: 0.7),
    ours.CosineAnnealingWithWarmupScheduler: (
        {"alpha_f": 0.1},
        1.0,
        lambda part: 0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2,
    ),
    ours.PolynomialWithWarmupScheduler: ({"alpha_f": 0.1}, 1.0, lambda part: 0.1 + 0.9 * (1 - part) ** 2),
}


@pytest.mark.parametrize("kind", WARMED)
@pytest.mark.parametrize(("warmup", "end"), [("5ba", "20ba"), ("20sp", "80sp"), ("50tok", "200tok")])
def test_a_warmup_rises_to_where_the_curve_begins(kind, warmup, end):
    options, peak, curve = WARMED[kind]
    expected = [peak * batch / 5 if batch < 5 else curve(min((batch - 5) / 15, 1.0)) for batch in range(31)]
    assert values(kind(warmup, t_max=end, **options)) == pytest.approx(expected, abs=1e-12)
    assert kind(warmup, t_max=warmup, **options)(at(9)) == curve(0.0)


def test_a_warmup_before_milestones():
    found = values(ours.MultiStepWithWarmupScheduler("4ba", ["1ep", "3ep"], gamma=0.5), 25)
    assert found == [0, 0.25, 0.5, 0.75] + [1.0] * 3 + [0.5] * 14 + [0.25] * 4


@pytest.mark.parametrize("duration", ["28ba", "112sp", "280tok", "14s", "4ep"])
def test_a_part_of_a_training_is_the_same_in_every_unit(duration):
    assert values(ours.LinearScheduler(t_max="0.5dur"), duration=duration) == pytest.approx(
        [max(1 - batch / 14, 0.0) for batch in range(31)]
    )


def test_times_in_seconds_are_those_of_the_clock():
    assert values(ours.StepScheduler("2s", 0.5), 10) == [1.0] * 4 + [0.5] * 4 + [0.25] * 2
    warmed = ours.CosineAnnealingWithWarmupScheduler("1s", "3s")
    curve = [(1 + math.cos(math.pi * part)) / 2 for part in (0.25, 0.5, 0.75, 1)]
    assert values(warmed, 7, duration="3s") == pytest.approx([0, 0.5, 1, *curve])


def test_parts_that_floats_do_not_meet_are_not_cut_off():
    assert ours.MultiStepScheduler(collections.UserList(["0.29dur"]))(at(28, "100ba")) == 1.0
    assert ours.MultiStepScheduler(["0.29dur"])(at(29, "100ba")) == 0.1


def test_ratios_stretch_a_schedule_and_on_demand_its_warmup():
    state = at(8)
    assert ours.StepScheduler("4ba")(state, 2.0) == 0.1 and ours.StepScheduler("4ba").schedule(state) == 0.1**2
    slow = ours.LinearWithWarmupScheduler("10ba", scale_warmup=True)
    assert slow(state, 2.0) == 8 / 20 and ours.LinearWithWarmupScheduler("10ba")(state, 2.0) == 8 / 10


@pytest.mark.parametrize(
    ("schedule", "options", "words"),
    [
        (ours.StepScheduler("0.01dur"), {"duration": "10ba"}, "0.01dur is less than one batch"),
        (ours.CosineAnnealingWarmRestartsScheduler("4ba", 0.5), {}, "4ba is less than one batch"),
        (ours.LinearScheduler(t_max="2ep"), {"length": None}, "2ep needs a loader with a length"),
        (ours.LinearScheduler(), {"length": None}, "1.0dur needs a loader with a length"),
        (ours.ComposerScheduler(), {}, "neither schedule"),
    ],
)
def test_times_that_make_no_schedule_are_errors(schedule, options, words):
    with pytest.raises((ConfigError, NotImplementedError), match=words):
        values(schedule, **options)


@pytest.mark.parametrize(
    ("schedule", "options", "words"),
    [
        (ours.LinearWithWarmupScheduler("2sp"), {}, "in a training of 4ep one is sp, one ba"),
        (ours.StepScheduler("50tok"), {"tokens": False}, "50tok stays where it begins, .* get_num_tokens_in_batch"),
        (ours.ConstantWithWarmupScheduler("2tok", t_max="9tok"), {"tokens": False}, "2tok stays"),
        (ours.MultiStepScheduler(["3ba", "90tok"]), {"tokens": False}, "90tok stays"),
        (ours.LinearScheduler(), {"tokens": False, "duration": "280tok"}, "1.0dur stays"),
        (ours.MultiStepWithWarmupScheduler("4ba", ["1tok"]), {"tokens": False}, "1tok stays"),
    ],
)
def test_times_that_make_no_schedule_are_errors_before_the_first_batch(schedule, options, words):
    with pytest.raises(ConfigError, match=words):
        schedule(at(0, **options))


def test_no_warmup_is_warned_of():
    with pytest.warns(UserWarning, match="no warmup"):
        assert ours.CosineAnnealingWithWarmupScheduler("0ba")(at(0)) == 1.0


def optimizer_of(state):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.4)]
    state.optimizers = [torch.optim.SGD(groups, lr=1.0)]
    return state.optimizers[0]


def test_an_optimizer_follows_the_product_of_schedules_and_functions():
    state = at(0)
    optimizer = optimizer_of(state)
    given = [ours.LinearScheduler(t_max="10ba"), lambda state: 0.5]
    (scheduler,) = ours.bound_schedulers(given, state)
    for batch in range(4):
        state.timestamp = at(batch).timestamp
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps of the optimizer that are not made here
            scheduler.step()
        expected = [lr * (1 - batch / 10) * 0.5 for lr in (0.1, 0.4)]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)
    again = ours.compile_composer_scheduler(given[0], state)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.07, 0.28])
    assert again.optimizer is optimizer and ours.bound_schedulers([], state) == []


def test_schedulers_of_torch_are_taken_as_they_are_and_others_refused():
    state = at(0)
    optimizer = optimizer_of(state)
    torchs = lr_scheduler.StepLR(optimizer, 1)
    assert ours.bound_schedulers([torchs], state) == [torchs]
    foreign = lr_scheduler.StepLR(optimizer_of(at(0)), 1)
    for given, words in (
        ([foreign], "another optimizer"),
        ([torchs, ours.LinearScheduler()], "one kind"),
        ([lr_scheduler.ReduceLROnPlateau(optimizer)], "ReduceLROnPlateau"),
        ([3], "3 is none"),
    ):
        with pytest.raises(ConfigError, match=words):
            ours.bound_schedulers(given, state)
    with pytest.raises(ConfigError, match="scale_schedule_ratio"):
        ours.compile_composer_scheduler(lambda state: 1.0, state, 0.5)


def test_torchs_are_stepped_by_the_epoch_unless_somebody_says_otherwise():
    torchs = lr_scheduler.StepLR(optimizer_of(at(0)), 1)
    assert ours.steps_every_batch([ours.LinearScheduler()]) and not ours.steps_every_batch([torchs])
    assert ours.steps_every_batch([torchs], True) and not ours.steps_every_batch([], False)
