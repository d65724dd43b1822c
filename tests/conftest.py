# SPDX-License-Identifier: Apache-2.0
import os
import signal

import pytest
from launch import case_jobs
from launch.forked_ranks import run_folder
from launch.launcher_harness import Launcher
from soak import left_out

UNIT_FOLDERS = ("archive", "docs", "foreign", "plan", "python")

# Operations of tests are small, and several processes run at once; before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Signals that a shell ignores for its background jobs, as would all that is started here.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure():
    run_folder()  # in the process that lives longest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With -n, tests with ids that end with @JOB run in one process, which starts that job once; others run in any."""
    from xdist.scheduler import LoadScopeScheduling

    class Jobs(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid.rpartition("@")[2] if nodeid.endswith("]") and "@" in nodeid else nodeid

    return Jobs(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """A test has one of two markers: unit, or multiprocess when it starts ranks or the launcher. One that does so in a
    folder of the others, without the fixture, says it itself. For `make test` some are left out."""
    if os.environ.get("LAMINA_SAMPLE"):
        left = left_out(item.nodeid for item in items)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]
    for item in items:
        folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
        ranks = folder not in UNIT_FOLDERS or "launcher" in item.fixturenames or item.get_closest_marker("multiprocess")
        item.add_marker("multiprocess" if ranks else "unit")


def pytest_collection_finish(session):
    case_jobs.choose(item.nodeid for item in session.items)


@pytest.fixture
def launcher(tmp_path):
    """A Launcher; afterwards the test fails if anything of its jobs is left."""
    launcher = Launcher(tmp_path)
    yield launcher
    left = launcher.left_behind()
    launcher.clean_up()
    assert not left, f"left behind: {left}"
