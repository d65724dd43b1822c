# SPDX-License-Identifier: Apache-2.0
"""Copies of a model of which some are killed and started again: they join the others, with the losses of one process
that nobody disturbed."""

import sys
from pathlib import Path

import pytest
import torch
from fault.test_outliving import require_states
from launch.launcher_harness import PRELOAD, eventually
from soak import some

PROGRAM = Path(__file__).with_name("joining.py")
sys.path.insert(0, str(PROGRAM.parent))
SECONDS = 120

EVERY = [
    (place, victim, ranks) for place in ("forward", "before", "after") for ranks in (2, 3) for victim in range(ranks)
]
EVERY = [each for each in EVERY if each[1:] != (0, 2)]  # half without the first rank ends


def job(launcher, ranks, *deaths, least=1, most=None, code=0, program=PROGRAM, **environment):
    words = ("run", *PRELOAD, "-n", ranks, "--elastic", f"{least}:{most or ranks}", program, *deaths)
    run = launcher.run(*words, env=environment, deadline_s=SECONDS)
    assert run.returncode == code, run.stderr
    return run.stderr.splitlines()


def ends(launcher):
    """Results of those who have ended in order, by the place that the launcher gave them."""
    return {int(path.suffix[1:]): torch.load(path) for path in launcher.folder.glob("end.*")}


def require_undisturbed(found, ranks, losses_too=True):
    import joining

    losses, state, states = joining.outliving.plain(joining.STEPS)
    for end in found.values():
        assert end["size"] == ranks
        if not end["is_new"] and losses_too:
            torch.testing.assert_close(end["losses"], losses, rtol=1e-12, atol=1e-12)
        first = end["sizes"][0][0]
        torch.testing.assert_close(end["losses"][first:], losses[first:], rtol=1e-12, atol=1e-12)
        require_states(end, state, states)
        assert end["drawn"] == joining.STEPS


def said(lines, what):
    return [line for line in lines if what in line]


@pytest.mark.parametrize(("place", "victim", "ranks"), some(EVERY, 3, seed=4))
def test_one_that_is_killed_comes_back_and_joins_the_others(place, victim, ranks, launcher):
    lines = job(launcher, ranks, f"{place}:{victim}:3")
    found = ends(launcher)
    assert found.keys() == set(range(ranks)), lines
    assert found[victim]["is_new"]
    require_undisturbed(found, ranks)
    assert said(lines, f"lamina run: rank {victim} is started again in 0.5 s, to join them"), lines
    if victim == 0:
        return  # what the first rank says then goes to no terminal
    (joined,) = said(lines, "lamina: 1 rank has joined before step ")
    assert f": {ranks} ranks, copies {ranks}; " in joined


@pytest.mark.parametrize(
    "deaths", [("before:0:3", "after:2:3"), ("before:0:2", "forward:3:5"), ("forward:1:4", "forward:2:4")]
)
def test_two_are_killed_and_both_come_back(deaths, launcher):
    lines = job(launcher, 4, *deaths)
    found = ends(launcher)
    assert found.keys() == set(range(4)), lines
    assert sum(end["is_new"] for end in found.values()) == 2
    require_undisturbed(found, 4)


@pytest.mark.parametrize("what", ["dies init", "dies placed", "dies entering", "dies working"])
def test_a_newcomer_that_dies_disturbs_nobody(what, launcher):
    lines = job(launcher, 3, "before:1:3", NEWCOMER=what)
    found = ends(launcher)
    assert (launcher.folder / "faltered.1").exists(), lines
    assert {0, 2} <= found.keys(), lines
    require_undisturbed(found, len(found))
    given_up = said(lines, "rank 1 is not started again: it has ended in the same way twice")
    assert bool(given_up) == (1 not in found), lines  # else ranks took more than 10 s to come so far


@pytest.mark.parametrize("what", ["freezes init", "freezes placed"])
def test_a_newcomer_that_freezes_is_left_out(what, launcher):
    lines = job(launcher, 3, "before:1:3", NEWCOMER=what)
    found = ends(launcher)
    assert (launcher.folder / "faltered.1").exists(), lines
    assert found.keys() == {0, 2}, lines
    require_undisturbed(found, 2)
    assert "lamina run: rank 1 is not started again: the job is over" in lines


def test_the_first_rank_dies_while_another_one_comes_back(launcher):
    lines = job(launcher, 4, "before:1:3", "before:0:5")
    found = ends(launcher)
    assert found.keys() == set(range(4)), lines
    require_undisturbed(found, 4)


DIFFERS = {
    "script": "its script (SHA-256) is another one",
    "model": "its model is another one",
    "optimizer": "its optimizer is another one: SGD; the job has AdamW",
    "config": "its configuration is another one: seed 6; the job has seed 5",
}


@pytest.mark.parametrize(("what", "named"), DIFFERS.items())
def test_a_newcomer_that_differs_is_refused_by_name(what, named, launcher):
    lines = job(launcher, 3, "before:1:3", NEWCOMER=what)
    found = ends(launcher)
    assert found.keys() == {0, 2}, lines
    require_undisturbed(found, 2)
    assert said(lines, "lamina run: rank 1, started again, has not joined the others: exit code 1"), lines
    (line,) = said(lines, "lamina.errors.ConfigError: the job does not let this newcomer in: ")
    assert named in line and "[elastic-newcomer]" in line, line


def test_a_newcomer_to_another_training_of_the_script_is_refused(launcher):
    lines = job(launcher, 3, "before:1:3", TWICE="1")
    assert ends(launcher).keys() == {0, 2}, lines
    require_undisturbed(ends(launcher), 2)
    (line,) = said(lines, "lamina.errors.ConfigError: the job does not let this newcomer in: ")
    assert "its place in its script is another one: training number 1; the job has training number 2" in line, line


def test_a_model_of_which_a_part_alone_is_in_training_mode_takes_newcomers(launcher):
    lines = job(launcher, 3, "before:1:3", EVAL="1")
    assert ends(launcher).keys() == {0, 1, 2}, lines
    require_undisturbed(ends(launcher), 3)


def test_a_newcomer_freezes_what_the_others_have_frozen(launcher, monkeypatch):
    monkeypatch.setenv("FREEZES", "1")
    lines = job(launcher, 3, "before:1:3")
    assert ends(launcher).keys() == {0, 1, 2}, lines
    require_undisturbed(ends(launcher), 3)


def test_a_job_that_ends_while_somebody_comes_back_ends_in_order(launcher):
    lines = job(launcher, 3, "after:1:37", SLOW_S="0.2")
    found = ends(launcher)
    assert found.keys() == {0, 2}, lines
    require_undisturbed(found, 2)


def test_a_rank_that_is_told_to_end_leaves_in_order_and_comes_back(launcher):
    lines = job(launcher, 3, "leaves:1:3")
    found = ends(launcher)
    assert found.keys() == {0, 1, 2}, lines
    assert found[1]["is_new"]
    require_undisturbed(found, 3)
    assert "lamina run: rank 1 has left in order; 2 others go on" in lines
    assert not said(lines, "lost rank"), lines
    assert len(said(lines, "lamina: rank 1 has left before step 4: 2 ranks, copies 2; ")) == 1, lines


def test_the_first_rank_leaves_in_order(launcher):
    lines = job(launcher, 3, "leaves:0:3")
    found = ends(launcher)
    assert found.keys() == {0, 1, 2}, lines
    require_undisturbed(found, 3)
    assert "lamina run: rank 0 has left in order; 2 others go on" in lines


def require_all_leave(launcher, **environment):
    words = ("run", *PRELOAD, "-n", 3, "--elastic", "1:3", PROGRAM, "launcher:0:5")
    started = launcher.start(*words, env=environment)
    eventually((launcher.folder / "now").exists)
    started.terminate()
    _, errors = started.communicate(timeout=SECONDS)
    assert started.returncode == 128 + 15, errors
    assert not ends(launcher)
    assert "is started again" not in errors and "Traceback" not in errors


def test_a_job_that_is_told_to_end_leaves_in_order(launcher):
    require_all_leave(launcher)


def test_a_rank_is_not_started_again_where_too_few_are_left(launcher):
    lines = job(launcher, 3, "before:1:3", least=3, code=128 + 9)
    assert not said(lines, "is started again"), lines


@pytest.mark.parametrize(
    ("given", "named"),
    {
        "4": "--elastic: MIN is 4, which is more than the 3 ranks of the job",
        "2:2": "--elastic: MAX is 2, which is less than the 3 ranks of the job",
        "0:3": "--elastic must be 1 or greater, not 0",
        "3:2": "--elastic 3:2: MAX must be MIN or greater",
        "2:": "--elastic:  is not a whole number; write MIN or MIN:MAX, as in --elastic 2:4",
        "a:3": "--elastic: a is not a whole number; write MIN or MIN:MAX, as in --elastic 2:4",
        "2:3:4": "--elastic: 3:4 is not a whole number; write MIN or MIN:MAX, as in --elastic 2:4",
    }.items(),
)
def test_what_cannot_be_is_refused_before_anything_is_started(given, named, launcher):
    run = launcher.run("run", "-n", 3, "--elastic", given, PROGRAM)
    assert run.returncode == 2
    assert named in run.stderr
