# SPDX-License-Identifier: Apache-2.0
"""Callbacks that fail, or make a call of all ranks, on one rank of two. Nobody ends the ranks but they themselves."""

import itertools
import time
from pathlib import Path

import pytest
from launch.launcher_harness import eventually
from soak import some

from lamina.trainer import Event

RAISES = Path(__file__).with_name("trainer_raises.py")
LAYOUTS = "copies", "shards", "partitions"
BOUND_S = 60  # of a run; a rank that hangs waits for 300
LEADS_ALONE = {"before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward"}
LEADS_ALONE |= {"eval_before_forward", "eval_after_forward"}
EVERY = [
    (event.value, rank, layout)
    for event, rank, layout in itertools.product(Event, (0, 1), LAYOUTS)
    if not (layout == "partitions" and rank and event.value in LEADS_ALONE)
]


def ended(launcher, *words):
    """The exit codes of both ranks, and their standard errors."""
    ranks, by = launcher.start_ranks(2, RAISES, *words), time.monotonic() + BOUND_S
    errors = [rank.communicate(timeout=max(by - time.monotonic(), 0))[1] for rank in ranks]
    return [rank.returncode for rank in ranks], errors


@pytest.mark.parametrize("event, rank, layout", some(EVERY, 4))
def test_a_callback_that_raises_on_one_rank_ends_all(launcher, event, rank, layout):
    codes, errors = ended(launcher, event, rank, layout)
    assert all(codes), errors
    (said,) = (line for line in errors[rank].splitlines() if "ArithmeticError: planted" in line)
    assert said.endswith(f"ArithmeticError: planted in {event}")
    assert errors[rank].index("raise ArithmeticError") < errors[rank].index(said), "its own traceback is there"
    assert "Timeout" not in errors[1 - rank], "it learns of the end, and does not wait for it"


def test_workers_of_a_training_that_fails_leave_no_folder(launcher):
    temporary = launcher.folder / "tmp"
    temporary.mkdir()
    codes, errors = ended(launcher, "batch_end", 1, "copies", temporary)
    assert all(codes) and "ArithmeticError: planted" in errors[1], errors
    eventually(lambda: not list(temporary.glob("pymp-*")))


def test_the_models_values_asked_for_on_one_rank_hang_nobody(launcher):
    for layout in "copies", "shards":  # a rank has, or sees, all of them
        codes, errors = ended(launcher, "state_dict", 0, layout)
        assert codes == [0, 0], errors
    codes, errors = ended(launcher, "state_dict", 0, "partitions")
    assert all(codes)
    assert "Make these calls on all of these ranks, in the same order" in errors[0]
    assert "rank 0 waits in model.state_dict()" in errors[0]
