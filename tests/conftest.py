# SPDX-License-Identifier: Apache-2.0
import pytest
from launch.launcher_harness import Launcher


@pytest.fixture
def launcher(tmp_path):
    """A Launcher; afterwards the test fails if anything of its jobs is left."""
    launcher = Launcher(tmp_path)
    yield launcher
    left = launcher.left_behind()
    launcher.clean_up()
    assert not left, f"left behind: {left}"
