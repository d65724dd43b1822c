# SPDX-License-Identifier: Apache-2.0
"""Words for a user whose script runs, and does not what was meant."""

import signal
from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD

SAME_BATCH = Path(__file__).with_name("same_batch.py")


@pytest.mark.parametrize("how, told", [("same", 1), ("own", 0), ("sent", 0)])
def test_copies_that_train_on_the_same_first_batch_are_told_once(how, told, launcher):
    run = launcher.run("run", *PRELOAD, "-n", 2, SAME_BATCH, how)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("sampler=lamina.dist.get_sampler(dataset)") == told, run.stderr


def test_a_rank_that_ends_without_init_is_named_while_another_waits_for_it(launcher):
    (launcher.folder / "alone.py").write_text(
        "import os\nimport lamina\nif os.environ['RANK'] == '0':\n    lamina.init()\n"
    )
    job = launcher.start("run", *PRELOAD, "-n", 2, "--hang-timeout", 60, "alone.py")
    named = "lamina run: warning: rank 1 ended its program and never called lamina.init(), in which rank 0 waits for it"
    assert next(line for line in job.stderr if "hangs" in line or named in line).startswith(named)
    job.send_signal(signal.SIGINT)
    assert named not in job.communicate()[1]
    assert job.returncode == 130
