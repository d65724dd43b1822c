# SPDX-License-Identifier: Apache-2.0
"""Copies that a Trainer trains, of which some are killed and started again: they join the others, with the numbers of
one process, and each sample of an epoch once."""

import sys
from pathlib import Path

import pytest
import torch
from fault.test_outliving_trainer import require_numbers, undisturbed
from launch.launcher_harness import PRELOAD
from soak import some

PROGRAM = Path(__file__).with_name("joining_trainer.py")
sys.path.insert(0, str(PROGRAM.parent))
SECONDS = 150

EVERY = [
    (way, place, victim)
    for way in ("plain", "rows", "cut", "measured")
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


def require_undisturbed(found, ranks, way):
    one = undisturbed(way, ranks)
    for end in found.values():
        assert end["size"] == ranks
        heard, every = end["losses"].keys(), one["losses"].keys()
        assert heard and heard <= every and (end["is_new"] or heard == every)
        assert all(end["read"][number] == one["read"][number] for number in end["read"])
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
