# SPDX-License-Identifier: Apache-2.0
"""Ranks of a Trainer with parts that nobody else has, some of which are killed. The others go on from what was kept,
with the numbers of one process, and each sample of an epoch once."""

import json
import random

import pytest
from fault.test_outliving_trainer import (
    CALLS,
    NUMBERS,
    ends,
    require_predicted,
    require_saved_again,
    require_undisturbed,
    started,
)
from soak import paired, some

WAYS = ("partitions", "itself", "groups", "shards", "units", "divided", "slices")
PLACES = ("forward", "gradient", "after_train_batch", "updated", "keeping", "batch_end", "evaluation", "eval_end")
PLACES += ("epoch_end", "batch_checkpoint", "fit_end", "epoch_start", "batch_start")


@pytest.mark.parametrize(("way", "place"), paired(WAYS, PLACES, seed=1))
def test_the_others_go_on_wherever_one_is_killed(way, place, launcher):
    victim = (len(way) + len(place)) % 4
    found, lines = ends(launcher, 4, way, place, f"{victim}:{NUMBERS.get(place, 3)}")
    require_undisturbed(found, 3, way)
    assert sum(line.startswith("lamina: lost rank") for line in lines) == 1, lines


EARLY = ("fit_start", "epoch_start", "before_dataloader", "after_dataloader", "batch_start", "before_train_batch")


@pytest.mark.parametrize(("way", "place"), paired(WAYS, EARLY, seed=10))
def test_a_rank_may_be_lost_before_the_first_batch(way, place, launcher):
    found, lines = ends(launcher, 4, way, place, f"{(len(way) + len(place)) % 4}:0")
    require_undisturbed(found, 3, way)
    assert sum(line.startswith("lamina: lost rank") for line in lines) == 1, lines


def test_ranks_are_lost_before_the_first_batch_and_after_it(launcher):
    found, _ = ends(launcher, 5, "partitions 5", "none", "0:0:batch_start", "3:1:forward")
    require_undisturbed(found, 3, "partitions 5", of=5)


@pytest.mark.parametrize(("way", "deaths"), paired(WAYS, [("1:2", "2:8"), ("0:5", "3:6"), ("3:1", "0:11")], seed=2))
def test_two_are_lost_one_after_the_other(way, deaths, launcher):
    found, _ = ends(launcher, 4, way, "forward", *deaths)
    require_undisturbed(found, 2, way)


@pytest.mark.parametrize("way", some(["partitions", "shards", "units", "divided"], 2, seed=3))
def test_one_is_lost_while_others_go_on_without_another_one(way, launcher):
    found, _ = ends(launcher, 4, way, "going on", "1", "3::forward")  # rank 2 keeps what rank 1 has
    require_undisturbed(found, 2, way)


@pytest.mark.parametrize(("way", "place"), paired(WAYS, ["forward", "eval_start", "fit_end"], seed=4))
def test_versions_may_lie_several_batches_apart(way, place, launcher):
    found, _ = ends(launcher, 4, way, place, f"2:{ {'forward': 5}.get(place, NUMBERS.get(place)) }", EVERY=4)
    require_undisturbed(found, 3, way)


@pytest.mark.parametrize(("way", "place"), paired(WAYS, ["saving", "saved", "batch_checkpoint"], seed=5))
def test_a_checkpoint_that_was_being_saved_is_saved_again(way, place, launcher):
    require_saved_again(launcher, way, place)


@pytest.mark.parametrize(("way", "at"), paired(WAYS, CALLS, seed=7))
def test_calls_after_a_training_go_on_without_the_lost_one(way, at, launcher):
    place, number = at
    found, _ = ends(launcher, 4, way, place, f"{(number + len(way)) % 4}:{number}", CALLS=1)
    require_undisturbed(found, 3, way)
    if number < 212:
        require_predicted(found, way)


SECOND = [("meeting", 6), ("left", 6), ("fit_start", 6), ("before_dataloader", 6), ("forward", 7), ("meeting", 12)]


@pytest.mark.parametrize(("way", "at"), paired(("plain", *WAYS), SECOND, seed=8))
def test_a_second_training_goes_on_without_the_lost_one(way, at, launcher):
    place, number = at
    victim = 1 + (number + len(way)) % 3
    found, _ = ends(launcher, 4, way, place, f"{victim}:{number}", EVERY=3, FITS=2)
    require_undisturbed(found, 3, way)


def test_layouts_that_are_none_are_refused(launcher):
    processes = started(launcher, 4, "partitions", "none", LAYOUTS=json.dumps([{"partition": 3}]))
    outputs = [rank.communicate(timeout=90)[1] for rank in processes]
    assert all('"partition" is no key of a layout' in output for output in outputs), outputs


def test_the_first_layout_that_fits_is_taken(launcher):
    layouts = [{"partitions": 4}, {"partitions": 1, "sharded_data_parallel_degree": 3}]
    found, lines = ends(launcher, 4, "groups", "forward", "1", EVERY="auto", LAYOUTS=json.dumps(layouts))
    require_undisturbed(found, 3, "groups")
    assert any(line.startswith("lamina: lost rank 1") and " 3 ranks, copies 3; " in line for line in lines), lines


@pytest.mark.parametrize("seed", some(range(40), 1, seed=6))
def test_random_histories(seed, launcher):
    draw = random.Random(seed)
    way, deaths = draw.choice(WAYS), []
    for victim in draw.sample(range(4), draw.choice((1, 1, 2))):
        place = draw.choice(PLACES)
        number = NUMBERS[place] if place in NUMBERS else draw.randrange(1, 12)
        if place in ("evaluation", "eval_end"):
            number = draw.choice((3, 6, 9, 12))
        deaths.append(f"{victim}:{number}:{place}")
    every = 1 if any("keeping" in death for death in deaths) else draw.choice((1, 2, 5))
    found, _ = ends(launcher, 4, way, "none", *deaths, EVERY=every)
    require_undisturbed(found, 4 - len(deaths), way)
