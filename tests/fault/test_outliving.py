# SPDX-License-Identifier: Apache-2.0
"""Copies of a model of which some are killed: the others go on, with the losses of one process that nobody killed."""

import json
import sys
from pathlib import Path

import pytest
import torch
from fault.beside import Beside
from launch.launcher_harness import PRELOAD
from soak import some

PROGRAM = Path(__file__).with_name("outliving.py")
sys.path.insert(0, str(PROGRAM.parent))
BOUND_S = 5.0  # from a death to the end of the next step

EVERY = [(place, victim) for place in ("forward", "before", "after") for victim in range(3)]


def ends(launcher, ranks, place, *deaths, **more):
    """Returns what those who are left have written, by rank."""
    started = launcher.start_ranks(ranks, PROGRAM, place, *deaths, **more)
    with Beside(started) as beside:
        outputs = [rank.communicate(timeout=90)[1] for rank in started]
    dead = {int(each.partition(":")[0]) for each in deaths}
    assert [rank.returncode for rank in started] == [-9 if number in dead else 0 for number in range(ranks)], outputs
    found = {rank: torch.load(launcher.folder / f"end.{rank}") for rank in set(range(ranks)) - dead}
    first = min(json.loads(path.read_text())["at"] for path in launcher.folder.glob("death-*"))
    assert all(end["went_on"][0] - first < beside.scaled(BOUND_S) for end in found.values())
    return found


def require_states(end, state, states):
    """Model, states and rates are those of one process."""
    for name, value in state.items():
        torch.testing.assert_close(end["model"][name], value, rtol=1e-12, atol=1e-12)
    for number, values in states["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(end["optimizer"]["state"][number][key], value, rtol=1e-12, atol=1e-12)
    assert end["rates"] == [group["lr"] for group in states["param_groups"]]


def require_undisturbed(found, ranks):
    import outliving

    losses, state, states = outliving.plain()
    for end in found.values():
        assert end["size"] == ranks
        torch.testing.assert_close(end["losses"], losses, rtol=1e-12, atol=1e-12)
        require_states(end, state, states)


@pytest.mark.parametrize(("place", "victim"), some(EVERY, 3, seed=4))
def test_three_copies_go_on_as_two_wherever_one_is_killed(place, victim, launcher):
    require_undisturbed(ends(launcher, 3, place, str(victim)), 2)


def test_an_update_that_one_has_made_counts_for_all(launcher):
    require_undisturbed(ends(launcher, 3, "behind", "1"), 2)


def test_masters_and_their_states_stay_as_they_are(launcher):
    found = ends(launcher, 3, "before", "1", env={"HALF": "1"})
    for end in found.values():
        states = end["optimizer"]["state"]
        assert [float(state["step"]) for state in states.values()] == [9.0] * 6
        assert {state["exp_avg"].dtype for state in states.values()} == {torch.float32}


def test_random_numbers_go_on(launcher):
    started = launcher.start_ranks(3, PROGRAM, "none", env={"DROPOUT": "0.3"})
    outputs = [rank.communicate(timeout=90)[1] for rank in started]
    assert [rank.returncode for rank in started] == [0, 0, 0], outputs
    undisturbed = torch.load(launcher.folder / "end.0")["losses"]
    for end in ends(launcher, 3, "before", "1", env={"DROPOUT": "0.3"}).values():
        torch.testing.assert_close(end["losses"], undisturbed, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("place", "victim"), some([(place, rank) for _, rank in EVERY for place in ("before", "behind")], 2, seed=7)
)
def test_what_else_a_loop_has_goes_on(place, victim, launcher):
    victim = 1 if place == "behind" else victim
    started = launcher.start_ranks(3, PROGRAM, "none", env={"LOOP": "1"})
    outputs = [rank.communicate(timeout=90)[1] for rank in started]
    assert [rank.returncode for rank in started] == [0, 0, 0], outputs
    undisturbed = torch.load(launcher.folder / "end.0")
    assert undisturbed["scale"] != 2.0**16 and undisturbed["losses"][1] < float("inf")
    for end in ends(launcher, 3, place, str(victim), env={"LOOP": "1"}).values():
        torch.testing.assert_close(end["losses"], undisturbed["losses"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(end["model"], undisturbed["model"], rtol=1e-12, atol=1e-12)
        assert end["scale"] == undisturbed["scale"]


def test_copies_are_lost_one_after_the_other(launcher):
    require_undisturbed(ends(launcher, 4, "before", "0:2", "3:5"), 2)


def test_the_launcher_lets_the_others_go_on_while_enough_are_left(launcher):
    run = launcher.run("run", *PRELOAD, "-n", 3, "--elastic", 2, PROGRAM, "before", "1")
    assert run.returncode == 0, run.stderr
    assert "lamina run: rank 1 is lost: killed by signal 9 (SIGKILL); 2 others go on" in run.stderr.splitlines()
    said = [line for line in run.stderr.splitlines() if line.startswith("lamina: lost rank")]
    assert len(said) == 1 and said[0].startswith("lamina: lost rank 1 (machine "), said
    assert " in step 3: 2 ranks, copies 2; step 3 again, " in said[0], said
    require_undisturbed({rank: torch.load(launcher.folder / f"end.{rank}") for rank in (0, 2)}, 2)


def test_copies_share_out_microbatches_one_more_or_less(launcher):
    require_undisturbed(ends(launcher, 3, "before", "1", env={"MICROBATCHES": "1"}), 2)


def test_the_launcher_ends_the_others_where_too_few_are_left(launcher):
    run = launcher.run("run", *PRELOAD, "-n", 3, "--elastic", 3, PROGRAM, "before", "1")
    assert run.returncode == 128 + 9, run.stderr
    assert "lamina run: rank 1 failed: killed by signal 9 (SIGKILL)" in run.stderr.splitlines()


@pytest.mark.parametrize("victim", some([0, 1], 1, seed=7))
def test_one_that_is_killed_before_it_has_met_the_others_ends_the_job(victim, launcher):
    run = launcher.run("run", *PRELOAD, "-n", 3, "--elastic", 1, PROGRAM, "start", f"{victim}:-1")
    assert run.returncode == 128 + 9, run.stderr
    assert f"lamina run: rank {victim} failed: killed by signal 9 (SIGKILL)" in run.stderr.splitlines()
    assert not list(launcher.folder.glob("end.*"))


def test_one_that_is_killed_before_it_has_met_the_others_may_begin_again(launcher):
    run = launcher.run("run", *PRELOAD, "-n", 3, "--elastic", "1:3", PROGRAM, "start", "1:-1")
    assert run.returncode == 0, run.stderr
    assert "lamina run: rank 1 is started again in 0.5 s, to join them" in run.stderr.splitlines()
    require_undisturbed({rank: torch.load(launcher.folder / f"end.{rank}") for rank in range(3)}, 3)


def test_half_without_the_first_rank_ends(launcher):
    started = launcher.start_ranks(2, PROGRAM, "before", "0")
    outputs = [rank.communicate(timeout=90)[1] for rank in started]
    assert [rank.returncode for rank in started] == [-9, 1], outputs
    assert "are no majority" in outputs[1]
    assert "[elastic-ended]" in outputs[1]


def test_half_with_the_first_rank_goes_on(launcher):
    require_undisturbed(ends(launcher, 2, "before", "1"), 1)
