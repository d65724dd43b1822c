# SPDX-License-Identifier: Apache-2.0
"""`lamina run` told to end: by Ctrl-C on a terminal, by signals, once and twice."""

import contextlib
import os
import pty
import random
import signal
import sys
import time

import pytest
from launch.launcher_harness import READY, command, eventually
from soak import SOAK

DEAF = "trap '' TERM INT; " + READY + "while :; do sleep 1; done"
PLAIN = READY + "exec sleep 100"


def end_by(job, *signals):
    begin = time.monotonic()
    for number in signals:
        job.send_signal(number)
    _, err = job.communicate(timeout=30)
    return time.monotonic() - begin, err


@pytest.mark.parametrize("program", [PLAIN, DEAF], ids=["plain", "deaf"])
def test_ctrl_c_ends_all_with_130_within_the_grace_and_1_s(launcher, program):
    job = launcher.start_shell(3, program, flags=["--grace-period", 1])
    took_s, err = end_by(job, signal.SIGINT)
    assert job.returncode == 130
    assert took_s <= 2
    assert err.splitlines()[0] == "lamina run: SIGINT: ending 3 ranks"
    assert len(err.splitlines()) <= 20
    assert launcher.processes() == []


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_sigterm_and_sighup_end_all_with_128_plus_the_number(launcher, number, code):
    job = launcher.start_shell(2, PLAIN)
    took_s, _ = end_by(job, number)
    assert job.returncode == code
    assert took_s <= 2


def test_python_ranks_print_no_traceback(launcher):
    (launcher.folder / "wait.py").write_text(
        "import os, pathlib, signal\npathlib.Path(os.environ['DIR'], 'ready-' + os.environ['RANK']).touch()\n"
        "signal.pause()\n"
    )
    job = launcher.start("run", "-n", 2, "wait.py")
    eventually(lambda: all((launcher.folder / f"ready-{rank}").exists() for rank in range(2)))
    _, err = end_by(job, signal.SIGINT)
    assert job.returncode == 130
    assert err == "lamina run: SIGINT: ending 2 ranks\n"


def test_a_second_ctrl_c_kills_at_once(launcher):
    job = launcher.start_shell(2, DEAF)
    job.send_signal(signal.SIGINT)
    assert job.stderr.readline() == "lamina run: SIGINT: ending 2 ranks\n"
    took_s, _ = end_by(job, signal.SIGINT)
    assert job.returncode == 130
    assert took_s < 1, "before the grace of the first one was over"


@pytest.mark.parametrize("program", [PLAIN, DEAF], ids=["plain", "deaf"])
def test_a_signal_at_any_moment_of_the_start_ends_all(launcher, program):
    """Before the launcher holds signals back it dies of them itself, and has started nobody yet."""
    moments = random.Random(2)
    for _ in range(100 if SOAK else 5):
        job = launcher.start("run", "-n", 3, "--grace-period", 0, "-c", "sh", "-c", program)
        time.sleep(moments.uniform(0, 0.02))
        number = moments.choice([signal.SIGINT, signal.SIGTERM])
        took_s, _ = end_by(job, number)
        assert job.returncode in (128 + number, -number)
        assert took_s <= 1
        assert launcher.processes() == []


def test_a_rank_may_leave_in_order(launcher):
    job = launcher.start_shell(2, "trap 'touch $DIR/left-$RANK; exit 0' TERM; " + READY + "while :; do sleep 0.1; done")
    end_by(job, signal.SIGINT)
    assert job.returncode == 130
    assert (launcher.folder / "left-0").exists() and (launcher.folder / "left-1").exists()


def test_ctrl_c_during_the_grace_of_a_failure_keeps_the_failure(launcher):
    job = launcher.start("run", "-n", 2, "-c", "sh", "-c", f"test $RANK = 1 && exit 3; {DEAF}")
    assert job.stderr.readline() == "lamina run: rank 1 failed: exit code 3\n"
    eventually(lambda: (launcher.folder / "ready-0").exists())
    took_s, _ = end_by(job, signal.SIGINT)
    assert job.returncode == 3
    assert took_s < 4


def test_a_job_started_with_sigint_ignored_goes_on(launcher):
    """As a shell without job control starts its background jobs."""
    os.mkfifo(launcher.folder / "pipe")
    ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    job = launcher.start_shell(1, READY + "exec cat $DIR/pipe", preexec_fn=ignore)
    job.send_signal(signal.SIGINT)
    (launcher.folder / "pipe").write_text("go")
    assert job.wait(10) == 0


def on_terminal(launcher, program):
    """Starts one rank on a terminal of its own with `stty tostop`; returns its job and our end of the terminal."""
    ours, theirs = pty.openpty()
    take_it = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    take_it += "os.system('stty tostop'); os.execvp(sys.argv[1], sys.argv[1:])"
    words = ["-c", take_it, command(), "run", "-c", "sh", "-c", program]
    job = launcher.start(*words, binary=sys.executable, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    return job, ours


def all_of(terminal):
    """Reads what was written to it until its last user ended: our end then fails."""
    text = b""
    with contextlib.suppress(OSError):
        while True:
            text += os.read(terminal, 10000)
    return text.decode()


def test_on_a_terminal_rank_0_writes_and_reads_nothing_and_ctrl_c_works(launcher):
    job, terminal = on_terminal(launcher, "cat; echo hello; " + PLAIN)
    eventually(lambda: (launcher.folder / "ready-0").exists())
    os.write(terminal, b"\x03")
    assert job.wait(2) == 130
    text = all_of(terminal)
    os.close(terminal)
    assert "hello\r\n" in text and "lamina run: SIGINT: ending 1 rank\r\n" in text
