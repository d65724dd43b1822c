# SPDX-License-Identifier: Apache-2.0
"""`lamina verify` of scripts that are right, however odd."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("scripts.py")


@pytest.mark.parametrize(
    ("name", "ranks", "steps"),
    [("odd", 2, 7), ("again", 2, 3), ("adversaries", 2, 3), ("closure", 1, 2), ("fed", 2, 2), ("resumed", 2, 2)],
)
def test_takes_no_odd_script_for_wrong(launcher, name, ranks, steps):
    if name == "resumed":
        assert launcher.run("run", "-n", ranks, SCRIPT, name).returncode == 0
    (numbers := launcher.folder / "numbers").write_text("1 2 3")
    with numbers.open() as stdin:
        done = launcher.run("verify", "-n", ranks, "--steps", steps, SCRIPT, name, stdin=stdin)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f": {steps} steps" in done.stdout
    assert "gone on" not in done.stderr
