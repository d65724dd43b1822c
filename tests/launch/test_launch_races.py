# SPDX-License-Identifier: Apache-2.0
"""`lamina run` where two things happen at nearly the same time: at moments drawn with a seed, a hundred in a soak."""

import contextlib
import os
import random
import signal
import time

from launch.launcher_harness import READY, eventually
from soak import SOAK

MANY = 100 if SOAK else 5
# Orphans in a session of their own, one of them deaf.
ORPHANS = "(setsid sleep 100 &); (setsid sh -c 'trap \"\" TERM INT HUP; sleep 100; sleep 100' &); "


def guardian(job) -> int | None:
    with contextlib.suppress(OSError), open(f"/proc/{job.pid}/task/{job.pid}/children") as file:
        return next(map(int, file.read().split()), None)
    return None


def nobody_is_left(launcher, within_s=1.0):
    eventually(lambda: not launcher.processes(), within_s=within_s)


def test_of_ranks_that_die_at_nearly_the_same_time_one_is_named_and_the_code_is_its(launcher):
    """By an exit or a signal, within the time in which the others are noticed."""
    moments = random.Random(3)
    for _ in range(MANY):
        pauses = [f"{moments.uniform(0, 0.02):.4f}" for _ in range(4)]
        ways = [moments.choice([f"exit {rank + 1}", "kill -9 $$", "kill -11 $$"]) for rank in range(4)]
        cases = " ".join(f"{rank}) sleep {pauses[rank]}; {ways[rank]};;" for rank in range(4))
        result = launcher.shell(4, f"case $RANK in {cases} esac")
        first = result.stderr.splitlines()[0]
        named = int(first.split()[3])
        expected = {"exit": named + 1, "kill -9 $$": 137, "kill -11 $$": 139}
        way = ways[named] if ways[named].startswith("kill") else "exit"
        assert result.returncode == expected[way], (ways, pauses, result.stderr)
        assert first.startswith(f"lamina run: rank {named} failed: ")
        assert result.stderr.count("failed: ") == 1
        nobody_is_left(launcher)


def test_a_rank_that_exits_while_it_is_signalled_changes_nothing(launcher):
    """SIGTERM, because another one has failed, comes at any moment of its own end: well, or not, or in a trap."""
    moments = random.Random(4)
    for _ in range(MANY):
        end = moments.choice(["exit 0", "exit 9"])
        trap = moments.choice(["", "trap 'exit 5' TERM; ", "trap '' TERM; "])
        pause = 0.1 + moments.uniform(-0.02, 0.02)  # what has failed is certain after a tenth of a second
        wait = f"until test -e $DIR/ready-1; do sleep 0.001; done; sleep {pause:.4f}; {end}"
        result = launcher.shell(3, f"{trap}if test $RANK = 1; then {READY} exit 3; fi; {wait}")
        assert result.returncode == 3, (end, trap, pause, result.stderr)
        assert result.stderr.startswith("lamina run: rank 1 failed: exit code 3\n")
        nobody_is_left(launcher)
        (launcher.folder / "ready-1").unlink()


def test_a_signal_at_the_moment_of_a_failure_gives_one_of_both_codes_and_leaves_nobody(launcher):
    moments = random.Random(5)
    for _ in range(MANY):
        job = launcher.start("run", "-n", 2, "--grace-period", 1, "-c", "sh", "-c",
                             ORPHANS + READY + "test $RANK = 1 && exit 7; exec sleep 100")  # fmt: skip
        eventually(lambda: (launcher.folder / "ready-1").exists())
        time.sleep(moments.uniform(0, 0.15))
        number = moments.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
        job.send_signal(number)
        _, errors = job.communicate(timeout=10)
        assert job.returncode in (7, 128 + number), errors
        assert launcher.processes() == []
        for ready in launcher.folder.glob("ready-*"):
            ready.unlink()


def test_a_second_signal_at_any_moment_of_the_first_ones_end_leaves_nobody(launcher):
    moments = random.Random(6)
    for _ in range(MANY):
        job = launcher.start_shell(2, "trap 'sleep 0.02; exit 0' TERM; " + ORPHANS + READY + "sleep 100 & wait")
        job.send_signal(signal.SIGINT)
        time.sleep(moments.uniform(0, 0.05))
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=10)
        assert job.returncode == 130, errors
        assert launcher.processes() == []
        for ready in launcher.folder.glob("ready-*"):
            ready.unlink()


def test_launcher_and_guardian_killed_one_after_the_other_leave_nobody(launcher):
    """The kernel kills the ranks of a dead guardian. Only their orphans can outlive a kill of both: here are none."""
    moments = random.Random(7)
    for _ in range(MANY):
        job = launcher.start("run", "-n", 3, "-c", "sleep", "100")
        time.sleep(moments.uniform(0, 0.03))
        pids = [job.pid, guardian(job)]
        moments.shuffle(pids)
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(moments.uniform(0, 0.002))
        job.wait(10)
        nobody_is_left(launcher)


def test_a_restart_meets_nobody_of_the_start_before_however_they_end(launcher):
    """Grandchildren that are deaf, in sessions of their own, and that fork while they are killed."""
    forks = "(setsid sh -c 'while :; do sleep 0.001 & done' &); "
    count = "for p in /proc/[0-9]*; do grep -qs LAMINA_RESTART=0 $p/environ && echo $p; done; "
    again = f"if test $LAMINA_RESTART = 1; then test $RANK = 1 && {{ {count} }} > $DIR/old; exit 0; fi; "
    mark = "grep -qs " + launcher.mark + " $p/environ && "
    again = again.replace("grep -qs LAMINA_RESTART=0", mark + "grep -qs LAMINA_RESTART=0")
    for _ in range(max(1, MANY // 5)):
        result = launcher.shell(2, again + ORPHANS + forks + "sleep 0.02; exit 1", flags=["--restarts", 1])
        assert result.returncode == 0, result.stderr
        assert (launcher.folder / "old").read_text() == ""
        assert launcher.processes() == []
