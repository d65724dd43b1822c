# SPDX-License-Identifier: Apache-2.0
"""Ranks that cannot work together."""

from pathlib import Path

MISMATCHED = Path(__file__).with_name("mismatched.py")


def test_configurations_that_differ_end_every_rank_at_start_with_all_keys_and_values(launcher):
    ranks = launcher.start_ranks(2, MISMATCHED)
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 1
        assert "ConfigError: ranks 0 and 1 differ in their configuration; it must be the same on all." in errors
        assert "rank 0 and rank 1: " in errors
        assert "microbatches: 4 and 8" in errors and "ddp: false and true" in errors
