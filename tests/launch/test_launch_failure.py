# SPDX-License-Identifier: Apache-2.0
"""Promises of `lamina run` when a rank fails: it names that rank, shows why, ends the others, and leaves nothing."""

import os
import subprocess
import time

import pytest
from launch.launcher_harness import READY, command, eventually
from soak import SOAK


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_exit_code_is_the_failing_ranks(launcher, failing):
    result = launcher.shell(3, f"test $RANK = {failing} && exit 3; exec sleep 100")
    assert result.returncode == 3
    lines = result.stderr.splitlines()
    assert lines[0] == f"lamina run: rank {failing} failed: exit code 3"
    assert lines[-1] == "lamina run: 2 other ranks ended because of this"


@pytest.mark.parametrize("name, number", [("KILL", 9), ("SEGV", 11), ("TERM", 15)])
def test_a_signal_is_named_and_gives_128_plus_its_number(launcher, name, number):
    result = launcher.shell(2, f"test $RANK = 1 && kill -{name} $$; exec sleep 100")
    assert result.returncode == 128 + number
    assert result.stderr.splitlines()[0] == f"lamina run: rank 1 failed: killed by signal {number} (SIG{name})"
    assert result.stderr.endswith("lamina run: 1 other rank ended because of this\n")


def test_the_last_50_lines_of_the_failing_rank_are_shown_once(launcher):
    result = launcher.shell(3, "test $RANK = 1 || exec sleep 100; seq 1000 1079; echo the reason >&2; exit 1")
    lines = result.stderr.splitlines()
    assert lines[0] == "lamina run: rank 1 failed: exit code 1"
    assert lines[1:-2] == [
        "---- the last lines of rank 1 ----",
        *map(str, range(1031, 1080)),
        "the reason",
        "---- end of rank 1 ----",
    ]
    assert result.stdout == ""


def test_the_output_of_rank_0_is_not_repeated(launcher):
    result = launcher.shell(2, "test $RANK = 1 && exec sleep 100; echo out; echo err >&2; exit 1")
    assert result.stdout == "out\n"
    assert result.stderr.splitlines() == [
        "err",
        "lamina run: rank 0 failed: exit code 1",
        "lamina run: 1 other rank ended because of this",
    ]


@pytest.mark.parametrize("repetition", range(100 if SOAK else 10))
def test_a_killed_rank_is_named_though_its_peers_fail_at_once(launcher, repetition):
    """The peers notice through a pipe that the kernel closes, and may be reaped before the rank that was killed."""
    os.mkfifo(launcher.folder / "pipe")
    result = launcher.shell(2, "if test $RANK = 1; then exec 7> $DIR/pipe; kill -9 $$; fi; cat $DIR/pipe; exit 1")
    assert result.returncode == 137
    assert result.stderr.splitlines()[0] == "lamina run: rank 1 failed: killed by signal 9 (SIGKILL)"


def test_a_rank_killed_shortly_after_an_exit_is_the_cause(launcher):
    """Rank 0 exits first; rank 1 sees it and is killed: within the time in which order says little."""
    os.mkfifo(launcher.folder / "pipe")
    result = launcher.shell(2, "if test $RANK = 0; then exec 7> $DIR/pipe; exit 1; fi; cat $DIR/pipe; kill -9 $$")
    assert result.returncode == 137
    assert result.stderr.splitlines()[0] == "lamina run: rank 1 failed: killed by signal 9 (SIGKILL)"


def test_ranks_that_end_well_are_no_reason_to_end_the_others(launcher):
    """Rank 0 ends; rank 1 goes on until it is told."""
    os.mkfifo(launcher.folder / "pipe")
    job = launcher.start("run", "-n", 2, "-c", "sh", "-c", READY + "test $RANK = 0 || exec cat $DIR/pipe")
    eventually(lambda: len(launcher.processes()) == 3 and (launcher.folder / "ready-1").exists())
    assert job.poll() is None
    (launcher.folder / "pipe").write_text("go")
    assert job.wait(10) == 0


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(launcher):
    deaf = "trap '' TERM; touch $DIR/deaf-$RANK; while :; do sleep 1; done"
    wait = "until test -e $DIR/deaf-0 -a -e $DIR/deaf-1; do :; done; "
    begin = time.monotonic()
    result = launcher.shell(3, f"if test $RANK = 2; then {wait} exit 4; fi; {deaf}", flags=["--grace-period", 1])
    assert result.returncode == 4
    assert 1 <= time.monotonic() - begin < 5
    assert "lamina run: ranks 0, 1 still ran 1 s after SIGTERM: killed" in result.stderr


def test_a_stopped_rank_is_ended_too(launcher):
    begin = time.monotonic()
    stops = "if test $RANK = 0; then touch $DIR/ready; kill -STOP $$; fi; "
    assert launcher.shell(2, stops + "until test -e $DIR/ready; do :; done; exit 5").returncode == 5
    assert time.monotonic() - begin < 5, "it took SIGTERM, not the SIGKILL after the grace"


@pytest.mark.parametrize("ends", ["exit 0", "test $RANK = 0; exit $?", "kill -9 $$"])
def test_what_ranks_leave_behind_is_ended(launcher, ends):
    """Children in the rank's group, in a session of their own, and deaf ones; the fixture finds what is left."""
    program = "sleep 100 & setsid sleep 100 & sh -c 'trap \"\" TERM; while :; do sleep 1; done' & "
    launcher.shell(2, program + ends)
    assert launcher.processes() == []


def test_without_proc_what_ranks_leave_behind_is_ended(launcher):
    """The kernel then lists nobody's children. In a mount namespace, where the system lets us have one."""
    apart = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "--"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
        pytest.skip("no mount namespace here")
    program = "exec > /dev/null 2>&1; sleep 100 & setsid sh -c 'sleep 100 & touch $DIR/apart-$RANK; sleep 100' & "
    program += "until test -e $DIR/apart-$RANK; do :; done"
    words = ['mount -t tmpfs none /proc && exec "$@"', "sh", command(), "run", "-n", 2, "-c", "sh", "-c", program]
    result = launcher.run(*apart[1:], "sh", "-c", *words, binary=apart[0])
    assert (result.returncode, result.stderr) == (0, "")
    assert launcher.processes() == []


def test_when_the_launcher_is_killed_the_ranks_die(launcher):
    job = launcher.start_shell(3, READY + "exec sleep 100")
    eventually(lambda: len(launcher.processes()) == 5, within_s=5)  # what told that they are ready has ended
    job.kill()
    job.wait()
    eventually(lambda: not launcher.processes(), within_s=1)


def test_output_that_nobody_reads_any_more_does_not_stop_the_clean_up(launcher):
    reader, writer = os.pipe()
    os.close(reader)
    job = launcher.start("run", "-n", 2, "-c", "sh", "-c", "test $RANK = 1 && exit 6; exec sleep 100", stderr=writer)
    os.close(writer)
    assert job.wait(10) == 6


@pytest.mark.parametrize("repetition", range(100 if SOAK else 20))
def test_ranks_that_fail_together_give_one_report(launcher, repetition):
    result = launcher.shell(4, "exit $((RANK + 1))")
    assert result.returncode in (1, 2, 3, 4)
    rank = result.returncode - 1
    assert result.stderr.splitlines()[0] == f"lamina run: rank {rank} failed: exit code {rank + 1}"
    assert result.stderr.count("failed") == 1
    assert result.stderr.endswith("lamina run: 3 other ranks ended because of this\n")
