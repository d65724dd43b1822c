# SPDX-License-Identifier: Apache-2.0
"""Copies that a Trainer trains, of which some are killed and started again: they join the others, with the numbers of
one process, and each sample of an epoch once."""

import sys
from pathlib import Path

import pytest
import torch
from fault.test_outliving_trainer import require_numbers, undisturbed
from launch.launcher_harness import PRELOAD, eventually
from soak import paired, some

PROGRAM = Path(__file__).with_name("joining_trainer.py")
sys.path.insert(0, str(PROGRAM.parent))
SECONDS = 150

EVERY = [
    (way, place, victim)
    for way in ("plain", "rows", "cut", "rows cut", "measured")
    for place in ("batch_start", "forward", "update", "batch_end", "eval_start")
    for victim in range(4)
]


def job(launcher, ranks, way, *deaths, code=0, **environment):
    words = ("run", *PRELOAD, "-n", ranks, "--elastic", f"1:{ranks}", PROGRAM, way, *deaths)
    run = launcher.run(*words, env={key: str(value) for key, value in environment.items()}, deadline_s=SECONDS)
    assert run.returncode == code, run.stderr
    return run.stderr.splitlines()


def ends(launcher):
    paths = launcher.folder.glob("end.*")
    return {int(path.suffix[1:]): torch.load(path, weights_only=False) for path in paths}


def require_undisturbed(found, ranks, way, of=None, left_out=()):
    """But for what batches consist of that are left out, of which not every copy has a part."""
    one = undisturbed(way, of or ranks)
    for end in found.values():
        assert end["size"] == ranks
        heard, every = end["losses"].keys(), one["losses"].keys()
        assert heard and heard <= every and (end["is_new"] or heard == every)
        assert all(end["read"][number] == one["read"][number] for number in end["read"] if number not in left_out)
        require_numbers(end, one, of=end)


@pytest.mark.parametrize(("way", "place", "victim"), some(EVERY, 4, seed=5))
def test_one_that_is_killed_comes_back_and_joins_the_others(way, place, victim, launcher):
    lines = job(launcher, 4, way, f"{place}:{victim}:{3 if place != 'eval_start' else 6}")
    found = ends(launcher)
    assert found.keys() == set(range(4)), lines
    assert found[victim]["is_new"]
    require_undisturbed(found, 4, way)
    if victim == 0:
        return  # what the first rank says then goes to no terminal
    (joined,) = [line for line in lines if line.startswith("lamina: 1 rank has joined before step ")]
    assert ": 4 ranks, copies 4; " in joined


def test_two_are_killed_and_both_come_back(launcher):
    lines = job(launcher, 5, "plain", "forward:0:2", "batch_end:3:5")
    found = ends(launcher)
    assert found.keys() == set(range(5)), lines
    assert {rank for rank, end in found.items() if end["is_new"]} == {0, 3}
    require_undisturbed(found, 5, "plain")


def test_checkpoints_are_saved_by_all(launcher):
    folder = launcher.folder / "saves"
    lines = job(launcher, 4, "plain", "batch_end:1:3", SAVES=folder)
    found = ends(launcher)
    assert found.keys() == set(range(4)), lines
    require_undisturbed(found, 4, "plain")
    saved = {int(path.name.removeprefix("ba").removesuffix("_partial")) for path in folder.glob("ba*")}
    assert saved >= set(range(4, 13)), lines  # of the loss, what was under way is saved again, as it is then


def require_once(found):
    """No batch was run again."""
    for end in found.values():
        again = {at: times for at, times in end["times"].items() if at[0] == "batch_start" and times > 1}
        assert not again


@pytest.mark.parametrize("victim", [0, 2])
def test_one_that_is_told_to_end_leaves_in_order_and_comes_back(victim, launcher):
    lines = job(launcher, 3, "plain", f"leaves:{victim}:4")
    found = ends(launcher)
    assert found.keys() == {0, 1, 2}, lines
    assert found[victim]["is_new"]
    require_undisturbed(found, 3, "plain")
    require_once(found)
    assert f"lamina run: rank {victim} has left in order; 2 others go on" in lines
    assert not any("lost rank" in line for line in lines), lines


@pytest.mark.parametrize("way", ["partitions", "shards"])
def test_one_with_parts_leaves_in_order(way, launcher):
    run = launcher.run("run", *PRELOAD, "-n", 4, "--elastic", 2, PROGRAM, way, "leaves:1:4", deadline_s=SECONDS)
    assert run.returncode == 0, run.stderr
    found = ends(launcher)
    assert found.keys() == {0, 2, 3}, run.stderr
    require_undisturbed(found, 3, way, of=4)
    require_once(found)
    assert "lamina run: rank 1 has left in order; 3 others go on" in run.stderr
    assert "lost rank" not in run.stderr


@pytest.mark.parametrize("way", ["plain", "divided"])
def test_a_job_that_is_told_to_end_saves_and_leaves(way, launcher):
    folder = launcher.folder / "saves"
    env = {"SAVES": folder, "SAVE_EVERY": "100ba"}
    started = launcher.start(
        "run", *PRELOAD, "-n", 3, "--elastic", 1, PROGRAM, way, "launcher:0:5", env={k: str(v) for k, v in env.items()}
    )
    eventually((launcher.folder / "now").exists)
    started.terminate()
    _, errors = started.communicate(timeout=SECONDS)
    assert started.returncode == 128 + 15, errors
    assert not ends(launcher)
    assert "Traceback" not in errors and "lost rank" not in errors, errors
    assert len(list(folder.glob("ba*_partial"))) == 1, errors


WAYS = ("partitions", "itself", "groups", "shards", "units", "divided")
PARTS = [("forward", 1), ("batch_start", 0), ("updated", 2), ("batch_end", 3), ("eval_start", 1), ("epoch_start", 2)]


@pytest.mark.parametrize(("way", "at"), paired(WAYS, PARTS, seed=6))
def test_one_with_parts_that_is_killed_comes_back(way, at, launcher):
    place, victim = at
    lines = job(launcher, 4, way, f"{place}:{victim}:{6 if place in ('eval_start', 'epoch_start') else 3}")
    found = ends(launcher)
    assert found.keys() == set(range(4)), lines
    assert found[victim]["is_new"]
    require_undisturbed(found, 4, way)


@pytest.mark.parametrize("every", [3, "auto"])
def test_two_with_parts_are_killed_and_both_come_back(every, launcher):
    lines = job(launcher, 4, "partitions", "forward:0:2", "batch_end:2:5", EVERY=every)
    found = ends(launcher)
    assert found.keys() == set(range(4)), lines
    assert {rank for rank, end in found.items() if end["is_new"]} == {0, 2}
    require_undisturbed(found, 4, "partitions")


@pytest.mark.parametrize("way", some(WAYS, 2, seed=7))
def test_one_with_parts_leaves_in_order_and_comes_back(way, launcher):
    lines = job(launcher, 4, way, "leaves:1:4")
    found = ends(launcher)
    assert found.keys() == set(range(4)), lines
    assert found[1]["is_new"]
    require_undisturbed(found, 4, way)
    require_once(found)
    assert not any("lost rank" in line for line in lines), lines
