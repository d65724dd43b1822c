# SPDX-License-Identifier: Apache-2.0
import pytest
from launch.launcher_harness import Launcher


@pytest.fixture
def launcher(tmp_path):
    """A Launcher; afterwards the test fails if anything of its jobs is left."""
    launcher = Launcher(tmp_path)
    yield launcher
    left = launcher.processes()
    files = list(launcher.temporary.iterdir())
    launcher.clean_up()
    assert not left, f"processes left behind: {left}"
    assert not files, f"temporary files left behind: {files}"
