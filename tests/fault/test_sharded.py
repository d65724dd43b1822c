# SPDX-License-Identifier: Apache-2.0
"""A rank of a sharding group that is killed or stopped at a random instant of an iteration."""

import random
import re
import signal
import time
from pathlib import Path

import pytest
from fault.beside import Beside
from fault.test_rank_killed import BOUND_S, read, survivors
from launch.launcher_harness import PRELOAD
from soak import SOAK

SHARDED = Path(__file__).with_name("sharded.py")
LAYOUTS = [(2, 2, "auto"), (4, 2, "auto"), (4, 4, "auto"), (4, 4, "machines"), (2, 2, "nccl")]  # ranks, degree, backend
TIMEOUT_S = 4.0


def drawn(number):
    """A layout, a victim and a moment, the same for the same number."""
    draw = random.Random(f"sharded {number}")
    ranks, degree, backend = LAYOUTS[number % len(LAYOUTS)]
    return ranks, degree, backend, draw.randrange(ranks), round(1.5 * draw.random(), 3)


@pytest.mark.parametrize(
    ("ranks", "degree", "backend", "victim", "moment"), [drawn(number) for number in range(40 if SOAK else 5)]
)
def test_when_it_is_killed_every_survivor_names_it_within_2_s(ranks, degree, backend, victim, moment, launcher):
    started = launcher.start_ranks(ranks, SHARDED, victim, "killed", moment, degree, backend, 60)
    for _, error, _ in survivors(launcher, started, victim):
        assert re.search(rf"rank {victim} (is|was) lost", error), error
        assert "step had begun" not in error, "a plain loop knows no steps"


@pytest.mark.parametrize("victim", range(4))
def test_when_it_is_killed_in_a_pipeline_that_gathers_every_survivor_names_it_within_2_s(victim, launcher):
    moment = random.Random(f"pipeline {victim}").random()
    started = launcher.start_ranks(4, SHARDED, victim, "killed", round(moment, 3), 2, "pipeline", 60)
    for _, error, _ in survivors(launcher, started, victim):
        assert re.search(rf"rank {victim} (is|was) lost", error), error


@pytest.mark.parametrize(
    ("ranks", "degree", "backend", "victim", "moment"),
    # Before an iteration, when the others have gathers under way that were begun ahead of their time.
    [*(drawn(number) for number in range(20 if SOAK else 5)), (2, 2, "nccl", 0, -1.0)],
)
def test_when_it_is_stopped_the_others_leave_after_timeout_s(ranks, degree, backend, victim, moment, launcher):
    started = launcher.start_ranks(ranks, SHARDED, victim, "stopped", moment, degree, backend, TIMEOUT_S)
    others = [rank for number, rank in enumerate(started) if number != victim]
    with Beside(others) as beside:
        outputs = [rank.communicate(timeout=60)[1] for rank in others]
    stopped = read(launcher, f"death.{victim}")["at"]
    assert time.time() - stopped - TIMEOUT_S < beside.scaled(BOUND_S), outputs
    for rank, output in zip(others, outputs, strict=True):
        assert rank.returncode == 1, output
    first = min((read(launcher, f"error.{rank}") for rank in set(range(ranks)) - {victim}), key=lambda e: e["at"])
    assert first["text"].startswith("TimeoutError"), first
    # Its group waits for it; another group, which may give up first, for that one.
    group = range(victim // degree * degree, victim // degree * degree + degree)
    awaited = [victim] if ranks == degree else group
    assert any(re.search(rf"(without ranks? [\d, -]*|from rank ){rank}\b", first["text"]) for rank in awaited), first
    started[victim].send_signal(signal.SIGKILL)
    started[victim].communicate()


def test_a_script_that_catches_the_error_of_a_frozen_rank_ends_with_its_own_code(launcher):
    started = launcher.start_ranks(2, SHARDED, 0, "stopped", -1.0, 2, "nccl", TIMEOUT_S, 3)
    with Beside(started[1:]) as beside:
        output = started[1].communicate(timeout=60)[1]
    assert time.time() - read(launcher, "death.0")["at"] - TIMEOUT_S < beside.scaled(BOUND_S), output
    assert started[1].returncode == 3, output
    started[0].send_signal(signal.SIGKILL)
    started[0].communicate()


def test_orders_that_differ_end_the_job_with_both_sides(launcher):
    begun = time.monotonic()
    run = launcher.run("run", *PRELOAD, "-n", 2, Path(__file__).with_name("other_order.py"))
    assert time.monotonic() - begun < 20
    assert run.returncode == 1
    side = r"values of 1\.(first|second)\."
    wanted = rf"DesyncError: rank (\d) wants the {side}[\w., ]+, rank \d the {side}"
    found = re.search(wanted, run.stderr)
    assert found and found[2] != found[3], run.stderr


def test_orders_that_differ_in_a_pipeline_end_the_job_with_both_sides(launcher):
    begun = time.monotonic()
    run = launcher.run("run", *PRELOAD, "-n", 4, Path(__file__).with_name("other_order.py"), 2)
    assert time.monotonic() - begun < 20
    assert run.returncode == 1
    found = re.findall(r"values of 1\.(first|second)\.", run.stderr)
    assert {"first", "second"} <= set(found) and "DesyncError: rank" in run.stderr, run.stderr
