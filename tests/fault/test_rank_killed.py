# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed in a step: everyone ends within 5 s, with an error that names it."""

import json
import time
from pathlib import Path

import pytest
from fault.beside import Beside
from launch.launcher_harness import PRELOAD
from soak import some

VICTIM = Path(__file__).with_name("victim.py")
LEAVES = Path(__file__).with_name("leaves.py")
PLACES = ("forward", "backward", "weights", "between")
BOUND_S = 5.0

# Every place for every rank of two in a soak; a seeded few otherwise.
EVERY = [(size, rank, place) for size in (2, 3) for rank in range(size) for place in PLACES]
EVERY += [(2, 0, "body"), (3, 0, "body")]
CHOSEN = some(EVERY, 4, seed=20)


def read(launcher, name):
    return json.loads((launcher.folder / name).read_text())


def survivors(launcher, ranks, victim):
    """Lists, of a job whose rank `victim` is killed, each other rank, the text of its error, and what it wrote. All end
    within `BOUND_S`; each has heard of it within 2 s."""
    with Beside(ranks) as beside:
        outputs = [rank.communicate(timeout=60)[1] for rank in ranks]
    ended = time.time()
    assert ranks[victim].returncode == -9, outputs[victim]
    death = read(launcher, f"death.{victim}")["at"]
    assert ended - death < beside.scaled(BOUND_S)
    for rank in set(range(len(ranks))) - {victim}:
        error = read(launcher, f"error.{rank}")
        assert error["text"].startswith("PeerError"), error
        assert error["at"] - death < beside.scaled(2.0), error
        assert ranks[rank].returncode == 1, outputs[rank]
        yield rank, error["text"], outputs[rank]


def check_launcher(launcher, ranks, script, victim, *words, preload=PRELOAD):
    """Runs the script, whose rank `victim` is killed: the launcher names it first, and ends in time."""
    run = launcher.run("run", *preload, "-n", ranks, script, victim, *words)
    ended = time.time()
    assert run.returncode == 128 + 9, run.stderr
    verdicts = [line for line in run.stderr.splitlines() if line.startswith("lamina run:")]
    assert verdicts[0] == f"lamina run: rank {victim} failed: killed by signal 9 (SIGKILL)"
    assert ended - read(launcher, f"death.{victim}")["at"] < BOUND_S


@pytest.mark.parametrize(("size", "victim", "place"), CHOSEN)
def test_every_survivor_ends_within_5_s_and_names_the_dead_rank(size, victim, place, launcher):
    for _, error, output in survivors(launcher, launcher.start_ranks(size, VICTIM, victim, place), victim):
        assert f"rank {victim} is lost" in error
        assert f"rank {victim} is lost" in output


@pytest.mark.parametrize(("victim", "place"), [(1, "backward"), (1, "weights"), (0, "forward")])
def test_the_launcher_names_the_dead_rank_first_and_ends_within_5_s(victim, place, launcher):
    check_launcher(launcher, 2, VICTIM, victim, place)


@pytest.mark.parametrize("rank", some([0, 1], 1))
def test_a_rank_that_leaves_gives_the_job_its_exit_code_and_is_blamed(rank, launcher):
    run = launcher.run("run", *PRELOAD, "-n", 2, LEAVES, rank)
    assert run.returncode == 3, run.stderr
    verdicts = [line for line in run.stderr.splitlines() if line.startswith("lamina run:")]
    assert verdicts[0] == f"lamina run: rank {rank} failed: exit code 3"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "call, where", [("", "this rank is in step 1 of __main__.forward at "), ("saves", " in model.state_dict() at ")]
)
def test_the_other_rank_is_told_that_one_has_left_its_loop(call, where, rank, launcher):
    ranks = launcher.start_ranks(2, LEAVES, rank, 0, call)
    outputs = [each.communicate(timeout=60)[1] for each in ranks]
    lost = f"rank {rank} is lost: it came to the end of its program after 1 step"
    for said in (lost, "all ranks make the same calls of lamina", "inside of model.join()", where):
        assert said in outputs[1 - rank], outputs[1 - rank]
    assert "start the job again" not in outputs[1 - rank]
