# SPDX-License-Identifier: Apache-2.0
"""A kernel that fails ends the job where that is met: all ranks hear of it, and of where to look."""

from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD

PROGRAM = Path(__file__).with_name("failing_kernel.py")
WITHIN_S = 50.0  # of the job, which takes a few seconds; its `timeout_s` is 60
WHERE = "kernels run later than they are called: an earlier one than this may have failed"


def errors(launcher):
    return [(launcher.folder / f"error.{rank}").read_text() for rank in range(2)]


@pytest.mark.parametrize("place", ["forward", "backward", "loop", "sent"])
def test_is_told_by_its_rank_with_where_to_look_and_named_by_the_other(place, launcher):
    ranks = launcher.start_ranks(2, PROGRAM, place)
    said = [rank.communicate(timeout=WITHIN_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], said
    first, second = errors(launcher)
    assert "a kernel failed on device 1" in second and "out of range" in second
    told = said[1] if place in ("loop", "sent") else second  # what torch raises in calls of its own is not ours
    assert f"rank 1 of 2: {WHERE}" in told and "CUDA" not in told
    assert first.startswith("PeerError: ") and "a kernel failed on device 1" in first
    assert "rank 1 is lost: a kernel of emulated:1 failed" in first
    assert "terminate called" not in said[1] and "Fatal Python error" not in said[1]


def test_ends_the_process_of_a_program_that_goes_on_with_an_exit_code(launcher):
    ended = launcher.run("run", *PRELOAD, "-n", 2, PROGRAM, "forward", "caught")
    assert ended.returncode == 1, ended.stderr
    assert "lamina run: rank 1 failed: exit code 1" in ended.stderr
    assert WHERE in errors(launcher)[1]
