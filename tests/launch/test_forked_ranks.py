# SPDX-License-Identifier: Apache-2.0
"""The ranks that tests fork themselves, and end."""

import subprocess

from launch.forked_ranks import ForkedRank


def test_one_that_has_ended_unasked_takes_a_signal_like_any_other():
    process = subprocess.Popen(["true"])
    process.wait()
    rank = ForkedRank.__new__(ForkedRank)  # without a fork server, which would import torch
    rank.pid, rank.returncode = process.pid, None
    rank.kill()
