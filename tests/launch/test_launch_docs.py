# SPDX-License-Identifier: Apache-2.0
"""Every command of docs/launching.md does what it says."""

import re
import shlex
import signal

import pytest
from launch.command_place import command_place
from launch.launcher_harness import ROOT

PAGE = (ROOT / "docs/launching.md").read_text()
COMMANDS = [line.split(" #")[0].strip() for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
            for line in block.splitlines()]  # fmt: skip


@pytest.fixture
def place(launcher):
    (launcher.folder / "job.yaml").write_text(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
    return command_place(launcher.folder)


def jobs():
    """The commands, those together that one job is started by."""
    together = []
    for line in COMMANDS:
        if re.search("--node.rank 1|^lamina run --secret", line):
            together[-1].append(line)
        else:
            together.append([line])
    return together


@pytest.mark.parametrize("lines", jobs(), ids=lambda lines: shlex.join(lines)[:60].replace("/", " "))
def test_it_works(launcher, place, lines):
    setup = [line for line in lines if "lamina" not in line and len(lines) > 1]
    for line in setup:
        assert launcher.run("-c", line, binary="/bin/sh", env=place).returncode == 0
    port = str(launcher.reserve_port())
    here = [line.replace("10.0.0.1", "127.0.0.1").replace("29500", port) for line in lines]
    witness = f"127.0.0.1:{launcher.reserve_port()}"
    here = [line.replace("10.0.0.3:29501", witness) for line in here]
    # A signal is for the witness, and not for the shell.
    here = [f"exec {line}" if line.endswith(witness) else line for line in here]
    started = [launcher.start("-c", line, binary="/bin/sh", env=place) for line in here if line not in setup]
    waits = [started.pop(0)] if any(line.endswith(witness) for line in here) else []
    for job in started:
        _, errors = job.communicate(timeout=100)
        assert job.returncode == 0, errors
    for job in waits:  # a witness, which these ranks have not asked
        job.send_signal(signal.SIGINT)
        assert job.wait(10) == 130
    assert (launcher.folder / "met").exists(), "rank 0 met the others"
