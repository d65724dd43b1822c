# SPDX-License-Identifier: Apache-2.0
"""Ports of a job that strangers can reach."""

import os
from pathlib import Path

from launch.launcher_harness import PRELOAD, eventually

LISTENS = Path(__file__).with_name("listens.py")
LISTENING = "0A"  # in /proc/net/tcp


def listening_sockets():
    """The inodes of all sockets of this machine that a stranger could connect to over a network."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[9]: row[1] for row in rows if row[3] == LISTENING}


def held_by(process):
    inodes = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        target = os.readlink(link)
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def test_a_pipeline_that_runs_listens_on_no_port(launcher):
    """The launcher and its ranks, once they have found each other."""
    job = launcher.start("run", *PRELOAD, "-n", 2, LISTENS)
    eventually(lambda: all((launcher.folder / f"ready-{rank}").exists() for rank in range(2)))
    sockets = listening_sockets()
    processes = launcher.processes()
    assert len(processes) >= 4  # command, guardian, ranks
    held = {process: held_by(process) for process in processes}
    assert any(held.values()), "they have sockets"
    assert [sockets[inode] for inodes in held.values() for inode in inodes if inode in sockets] == []
    job.terminate()
    assert job.wait(30) == 143
