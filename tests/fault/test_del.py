# SPDX-License-Identifier: Apache-2.0
"""Objects of the user whose `__del__` fails, wherever the engine lets go of them."""

from pathlib import Path

FAILS_IN_DEL = Path(__file__).with_name("fails_in_del.py")


def test_it_is_told_as_python_tells_it_and_training_goes_on(launcher):
    ranks = launcher.start_ranks(2, FAILS_IN_DEL)
    for number, rank in enumerate(ranks):
        output, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors
        assert output.endswith(f"trained on {number}\n")
        assert "Exception ignored in: <function Fails.__del__" in errors
        assert "ValueError: in __del__" in errors
