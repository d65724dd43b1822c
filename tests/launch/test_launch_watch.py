# SPDX-License-Identifier: Apache-2.0
"""`lamina run` and its guardian: whoever of them is killed, whenever, nothing of the job lives on."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from launch.launcher_harness import READY, command, eventually
from soak import SOAK

# Processes as data loaders and their like become: another group, another session, orphans, deaf to signals.
FAMILY = (
    "sleep 100 & setsid sleep 100 & (setsid sleep 100 &) & (sh -c 'trap \"\" TERM INT HUP; sleep 100; sleep 100' &) ; "
)
STEADY = 5 + 3 * 4  # the launcher, its guardian, three ranks, and four or five of each one's family


def children(pid: int) -> list[int]:
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text().split()]


def guardian(job) -> int:
    return eventually(lambda: children(job.pid))[0]


def start_family(launcher):
    job = launcher.start_shell(3, FAMILY + READY + "exec sleep 100")
    eventually(lambda: len(launcher.processes()) >= STEADY)
    return job


def test_killed_launchers_leave_nobody_after_1_s(launcher):
    for _ in range(100 if SOAK else 3):
        job = start_family(launcher)
        job.kill()
        job.wait()
        eventually(lambda: not launcher.processes(), within_s=1)
        for ready in launcher.folder.glob("ready-*"):
            ready.unlink()


def test_a_launcher_killed_while_it_starts_leaves_nobody(launcher):
    """At any moment: before there is a guardian, between two ranks, after the last."""
    moments = random.Random(1)
    for _ in range(100 if SOAK else 10):
        job = launcher.start("run", "-n", 4, "-c", "sh", "-c", FAMILY + "exec sleep 100")
        time.sleep(moments.uniform(0, 0.03))
        job.kill()
        job.wait()
        eventually(lambda: not launcher.processes(), within_s=1)


def test_a_killed_guardian_takes_all_with_it(launcher):
    job = start_family(launcher)
    os.kill(guardian(job), signal.SIGKILL)
    _, errors = job.communicate(timeout=10)
    assert job.returncode == 137
    assert launcher.processes() == []
    assert "the guardian of the ranks was killed by signal 9 (SIGKILL): ending all ranks" in errors


def test_orphans_that_end_are_no_zombies(launcher):
    """The guardian has three children, the ranks, as soon as 60 orphans have come to it and ended."""
    orphans = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do (true &); done; "
    job = launcher.start_shell(3, orphans + READY + "exec sleep 100")
    eventually(lambda: len(children(guardian(job))) == 3, within_s=5)
    job.send_signal(signal.SIGTERM)
    assert job.wait(10) == 143


def test_the_ranks_signals_are_as_if_we_were_not_there(launcher):
    """Signals that we hold back for ourselves and our guardian are not held back in a rank."""
    show = "grep -E 'Sig(Blk|Ign)' /proc/self/status"
    alone = subprocess.run(["sh", "-c", show], capture_output=True, text=True, check=True).stdout
    blocked, ignored = launcher.shell(1, show).stdout.splitlines()
    assert blocked == alone.splitlines()[0]
    tty = 1 << signal.SIGTTIN - 1 | 1 << signal.SIGTTOU - 1
    assert int(ignored.split()[1], 16) & ~tty == int(alone.splitlines()[1].split()[1], 16) & ~tty


def test_ranks_see_descriptors_of_theirs_only(launcher):
    listed = launcher.shell(1, "ls -l /proc/$$/fd").stdout.splitlines()[1:]
    targets = {
        int(words[-3]): words[-1] for words in map(str.split, (line.replace(" (deleted)", "") for line in listed))
    }
    kinds = sorted(target.split(":")[0] for number, target in targets.items() if number > 2)
    assert kinds == ["/memfd", "socket"], f"the secret, and where steps are reported; not {targets}"


GREEDY = """
import os, signal
if os.environ["RANK"] == "1":
    hold = [bytearray(os.urandom(1 << 20)) for _ in range(1000)]
signal.pause()
"""


@pytest.fixture
def memory_group(tmp_path):
    """A control group of 100 MiB, as batch systems and containers make them."""
    version_2 = pathlib.Path("/sys/fs/cgroup/cgroup.controllers").exists()
    base = pathlib.Path("/sys/fs/cgroup" if version_2 else "/sys/fs/cgroup/memory")
    group = base / f"lamina-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(100 << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    eventually(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_rank_killed_for_lack_of_memory_is_said_to_be(launcher, memory_group):
    (launcher.folder / "greedy.py").write_text(GREEDY)
    enter = f'echo $$ > {memory_group}/cgroup.procs; exec "$@"'
    words = ["-c", enter, "sh", command(), "run", "-n", "2", "-c", sys.executable, "-S", "greedy.py"]
    result = launcher.run(*words, binary="/bin/sh")
    assert result.returncode == 137
    assert result.stderr.splitlines()[0] == (
        "lamina run: rank 1 failed: killed by signal 9 (SIGKILL) while the kernel's OOM killer was at work: "
        "memory ran out"
    )
