# SPDX-License-Identifier: Apache-2.0
"""A rank of which a thread hangs keeps all others waiting. Its launcher ends it, with its stack, before their waits end
by errors, and they go on."""

import json
import re

import pytest
import torch
from fault import test_outliving_parts as parts
from fault.test_joining import require_undisturbed as require_joined
from fault.test_outliving import PROGRAM, require_undisturbed
from launch.launcher_harness import PRELOAD
from soak import some

TIMEOUT_S = 20


def require_ended(run, victim):
    assert run.returncode == 0, run.stderr
    said = rf"^lamina run: rank {victim} keeps the others waiting \((in|after) step \d+ for \d+ s\): it shows its stack"
    lines = run.stderr.splitlines()
    (at,) = [number for number, line in enumerate(lines) if re.search(said, line)]
    (lost,) = [number for number, line in enumerate(lines) if f"rank {victim} is lost: killed by signal 6" in line]
    assert at < lost
    assert [line for line in lines[at:] if re.search(rf'{PROGRAM.name}", line \d+ in fall', line)], run.stderr


def found(launcher, ranks):
    return {rank: torch.load(launcher.folder / f"end.{rank}") for rank in ranks}


@pytest.mark.parametrize("place", some(["forward", "before", "after"], 2, seed=2))
def test_copies_go_on_without_it(place, launcher):
    env = {"STUCK": "1", "TIMEOUT": str(TIMEOUT_S)}
    run = launcher.run("run", *PRELOAD, "-n", 3, "--elastic", 2, PROGRAM, place, "1", env=env)
    require_ended(run, 1)
    require_undisturbed(found(launcher, (0, 2)), 2)


@pytest.mark.parametrize("victim", some(range(4), 2, seed=1))
@pytest.mark.parametrize("layout", some(["pp 4", "pp 2 x copies 2", "sdp 4"], 2, seed=8))
def test_ranks_with_parts_go_on_without_it(layout, victim, launcher, monkeypatch):
    """Others ask it for a part of the model, or it asks them: all threads but one wait in its step."""
    keys = json.dumps(parts.LAYOUTS[layout])
    words = ("run", *PRELOAD, "-n", 4, "--elastic", 3, parts.PROGRAM, keys, "forward", str(victim))
    run = launcher.run(*words, env={"STUCK": "1", "TIMEOUT": str(TIMEOUT_S)})
    require_ended(run, victim)
    parts.require_undisturbed(found(launcher, set(range(4)) - {victim}), monkeypatch)


def test_it_comes_back(launcher):
    program = PROGRAM.with_name("joining.py")
    words = ("run", *PRELOAD, "-n", 3, "--elastic", "2:3", program, "before:1:3")
    run = launcher.run(*words, env={"STUCK": "1", "TIMEOUT": str(TIMEOUT_S), "SLOW_S": "0.7"})
    require_ended(run, 1)
    ends = found(launcher, range(3))
    require_joined(ends, 3)
    assert ends[1]["is_new"]


def test_hang_timeout_says_when(launcher):
    words = ("run", *PRELOAD, "-n", 3, "--elastic", 2, "--hang-timeout", 12, PROGRAM, "before", "1")
    run = launcher.run(*words, env={"STUCK": "1"})
    require_ended(run, 1)
    require_undisturbed(found(launcher, (0, 2)), 2)


def test_ranks_that_all_compute_for_long_are_not_stuck(launcher):
    env = {"TIMEOUT": "2", "STEP_S": "2.5"}
    run = launcher.run("run", *PRELOAD, "-n", 2, "--elastic", 1, PROGRAM, "slow", env=env)
    assert run.returncode == 0, run.stderr
    assert "keeps the others waiting" not in run.stderr
    require_undisturbed(found(launcher, (0, 1)), 2)
