# SPDX-License-Identifier: Apache-2.0
"""`lamina run`: where what the ranks write goes, and what is kept of it."""

import os
import re
import resource
import select
import shutil
import signal
import sys

import pytest
from launch.launcher_harness import eventually

SAY = "echo out $RANK; echo err $RANK >&2"


def kept(result, launcher):
    """Returns what the folder holds that a failed job says it has kept its output in."""
    folders = re.findall(r"lamina run: all that the other ranks wrote is in (\S+)\n", result.stderr)
    assert len(folders) == 1
    folder = launcher.temporary / os.path.basename(folders[0])
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_each_rank_but_the_first_has_its_files_in_folders_that_are_made(launcher):
    pattern = "logs/{world_size}/{node_rank}/{local_world_size}-{local_rank}-{rank:03}."
    result = launcher.shell(3, SAY, flags=["--stdout", pattern + "out", "--stderr", pattern + "err"])
    assert (result.returncode, result.stdout, result.stderr) == (0, "out 0\n", "err 0\n")
    logs = {path.name: path.read_text() for path in (launcher.folder / "logs/3/0").iterdir()}
    assert logs == {f"3-{rank}-00{rank}.{kind}": f"{kind} {rank}\n" for rank in (1, 2) for kind in ("out", "err")}


def test_one_file_takes_both_in_the_order_they_were_written(launcher):
    launcher.shell(2, "for i in 1 2 3; do echo out $i; echo err $i >&2; done", flags=["--stdout=log", "--stderr=log"])
    assert (launcher.folder / "log").read_text().split("\n") == [f"{k} {i}" for i in "123" for k in ("out", "err")] + [
        ""
    ]


def test_files_that_are_there_are_appended_to(launcher):
    for _ in range(2):
        assert launcher.shell(2, "echo once; test $RANK = 0", flags=["--stdout", "log"]).returncode == 1
    assert (launcher.folder / "log").read_text() == "once\nonce\n"


def test_the_tail_shown_is_of_this_job_only(launcher):
    (launcher.folder / "log").write_text("of yesterday\n")
    result = launcher.shell(2, "echo of today; test $RANK = 0", flags=["--stdout", "log", "--stderr", "log"])
    assert "of today" in result.stderr and "of yesterday" not in result.stderr


def test_ranks_that_would_share_a_file_are_pointed_out(launcher):
    result = launcher.shell(3, "echo $RANK", flags=["--stdout", "log"])
    assert result.stderr == "lamina run: warning: --stdout log makes ranks share a file: put {rank} into it\n"
    assert sorted((launcher.folder / "log").read_text().split()) == ["1", "2"]


@pytest.mark.parametrize(
    "pattern, says",
    [("{frank}", "--stdout {frank}: {frank} is not known"), ("{", "--stdout {: the { at character 1"),
     ("/proc/no/log", "cannot write /proc/no/log: its folder cannot be made: "), ("", "a file name is missing"),
     ("pipe", "cannot write pipe: it is a pipe"), (".", "cannot write .: Is a directory")],
)  # fmt: skip
def test_a_file_that_cannot_be_is_said_before_the_start(launcher, pattern, says):
    os.mkfifo(launcher.folder / "pipe")
    result = launcher.shell(2, "touch $DIR/started-$RANK", flags=["--stdout", pattern])
    assert result.returncode == 2
    assert says in result.stderr and result.stderr.count("\n") == 1
    assert not list(launcher.folder.glob("started-*"))


def test_what_ranks_wrote_is_gone_after_a_success(launcher):
    assert launcher.shell(3, SAY).returncode == 0
    assert list(launcher.temporary.iterdir()) == []


def test_what_all_ranks_wrote_is_kept_after_a_failure(launcher):
    wait = "test $RANK = 2 || { touch $DIR/wrote-$RANK; exec sleep 100; }; "
    wait += "until test -e $DIR/wrote-1; do :; done; "
    result = launcher.shell(3, "seq 1000 2000; " + wait + "exit 3")
    assert result.returncode == 3
    lines = "".join(f"{i}\n" for i in range(1000, 2001))
    assert kept(result, launcher) == {"rank1.log": lines, "rank2.log": lines}


def test_of_a_rank_that_writes_much_the_last_part_is_kept(launcher):
    result = launcher.shell(2, "test $RANK = 0 && exec sleep 100; seq 300000; exit 3", flags=["--log-limit", 1])
    text = "".join(f"{i}\n" for i in range(1, 300001))
    first = f"[the first {len(text) - (1 << 20)} bytes are not kept]\n"
    assert kept(result, launcher) == {"rank1.log": first + text[-(1 << 20) :]}
    assert result.stderr.splitlines()[2] == "299951", "the last 50 lines are shown"


def test_a_full_disk_costs_no_reason_and_is_said_once(launcher):
    """A limit on the size of files stands for it."""

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))

    program = "test $RANK = 0 && exec sleep 100; seq 100000; echo the reason >&2; test $RANK = 2 && exec sleep 100; "
    program += "until test -e $DIR/said; do :; done; exit 3"
    job = launcher.start("run", "-n", 3, "-c", "sh", "-c", program, preexec_fn=full)
    folder = launcher.temporary
    assert job.stderr.readline() == (
        f"lamina run: warning: what ranks write cannot be kept in {folder}: File too large; the last 64 KiB of each "
        "rank are kept in memory\n"
    )
    (launcher.folder / "said").touch()
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 3
    lines = errors.splitlines()
    assert lines[:2] == ["lamina run: rank 1 failed: exit code 3", "---- the last lines of rank 1 ----"]
    assert "\n100000\nthe reason\n---- end of rank 1" in errors and "cannot be kept" not in errors
    assert re.search(r"what the other ranks wrote is in \S+, but not all of it: File too large\n", errors)


def test_a_named_file_that_is_full_costs_no_reason_either(launcher):
    flags = ["--stdout", "/dev/full", "--stderr", "/dev/full"]
    result = launcher.shell(2, "test $RANK = 0 && exec sleep 100; echo the reason; exit 3", flags=flags)
    assert result.returncode == 3
    assert result.stderr.count("cannot be kept in /dev/full: No space left on device") == 1
    assert "the reason\n" in result.stderr


def test_nothing_is_kept_of_a_job_that_was_ended(launcher):
    job = launcher.start_shell(2, "echo something; touch $DIR/ready-$RANK; exec sleep 100")
    job.terminate()
    _, errors = job.communicate(timeout=10)
    assert errors == "lamina run: SIGTERM: ending 2 ranks\n"
    assert list(launcher.temporary.iterdir()) == []


def test_tee_shows_the_lines_of_all_ranks_and_files_get_them_as_they_are(launcher):
    result = launcher.shell(2, SAY + "; printf 'not ended'", flags=["--tee", "--stdout", "log"])
    assert sorted(result.stdout.splitlines()) == ["[0] not ended", "[0] out 0", "[1] not ended", "[1] out 1"]
    assert sorted(result.stderr.splitlines()) == ["[0] err 0", "[1] err 1"]
    assert (launcher.folder / "log").read_text() == "out 1\nnot ended"


def is_full(reader: int) -> bool:
    """True when the pipe takes no more. Bytes say nothing: each small write may take a page of it for itself."""
    writer = os.open(f"/proc/self/fd/{reader}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        return not select.select([], [writer], [], 0)[1]
    finally:
        os.close(writer)


PIECES = """
import os, random, sys
rank = int(os.environ["RANK"])
rng = random.Random(rank)
text = "".join(f"{rank} {i} {'x' * rng.randrange(300)} end\\n" for i in range(3000)).encode()
at = 0
while at < len(text):
    size = rng.randrange(1, 2000)
    os.write(1, text[at : at + size])
    at += size
"""


def test_tee_mixes_nothing_within_a_line_and_loses_none(launcher):
    """Half a megabyte from each rank, written in pieces that end anywhere, to somebody who reads late."""
    (launcher.folder / "pieces.py").write_text(PIECES)
    job = launcher.start("run", "-n", 6, "--tee", "-c", sys.executable, "-S", "pieces.py")
    eventually(lambda: is_full(job.stdout.fileno()))
    out, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    next_line = dict.fromkeys(range(6), 0)
    for line in out.splitlines():
        match = re.fullmatch(r"\[(\d)\] (\d) (\d+) x* end", line)
        assert match, line
        shown, rank, number = map(int, match.groups())
        assert shown == rank and number == next_line[rank]
        next_line[rank] += 1
    assert set(next_line.values()) == {3000}


def test_tee_shows_what_a_failed_rank_wrote_once_and_before_the_reason(launcher):
    result = launcher.shell(2, "test $RANK = 1 || exec sleep 100; echo the reason >&2; exit 1", flags=["--tee"])
    assert result.returncode == 1
    assert result.stderr.splitlines()[:3] == [
        "[1] the reason",
        "lamina run: rank 1 failed: exit code 1",
        "lamina run: 1 other rank ended because of this",
    ]
    assert "the last lines" not in result.stderr


def test_tee_to_nobody_ends_the_job_as_any_command_of_a_pipeline(launcher):
    """Ranks are ended in order: they may write a checkpoint."""
    reader, writer = os.pipe()
    program = "trap 'touch $DIR/left-$RANK; exit 0' TERM; while :; do echo $RANK; sleep 0.01; done"
    job = launcher.start("run", "-n", 2, "--tee", "-c", "sh", "-c", program, stdout=writer)
    os.close(writer)
    assert os.read(reader, 4) in (b"[0] ", b"[1] ")
    os.close(reader)
    _, errors = job.communicate(timeout=20)
    assert job.returncode == 128 + signal.SIGPIPE
    assert errors.startswith("lamina run: SIGPIPE (nobody reads what --tee shows any more): ending 2 ranks\n")
    assert (launcher.folder / "left-0").exists() and (launcher.folder / "left-1").exists()


def test_tee_into_a_full_file_says_so_and_goes_on(launcher):
    with open("/dev/full", "w") as full:
        result = launcher.shell(2, "echo something; sleep 0.2; echo more", flags=["--tee"], stdout=full)
    assert result.returncode == 0
    says = "lamina run: warning: what --tee shows cannot be written: No space left on device; the job goes on\n"
    assert result.stderr == says


def test_verbose_says_what_is_started_and_how_it_ended(launcher):
    result = launcher.shell(2, "exit 0", flags=["--verbose", "--master_port", "29511"])
    lines = result.stderr.splitlines()
    program = shutil.which("sh")
    assert lines[0] == f"lamina run: starting 2 of 2 ranks of {program} on machine 0 of 1; they meet at 127.0.0.1:29511"
    assert re.fullmatch(r"lamina run: rank 1 is process \d+", lines[2])
    assert sorted(lines[3:]) == [f"lamina run: rank {rank} has ended: exit code 0" for rank in (0, 1)]


def test_somebody_who_does_not_read_keeps_no_failed_job_alive(launcher):
    """As a pager does that nobody scrolls: our pipe is full when rank 1 fails."""
    reader, writer = os.pipe()
    loud = "while :; do echo some words of rank 0 that fill a pipe after a while; done"
    fails = "until test -e $DIR/full; do :; done; echo the reason; exit 3"
    job = launcher.start("run", "-n", 2, "-c", "sh", "-c", f"if test $RANK = 1; then {fails}; fi; {loud}",
                         stdout=writer, stderr=writer)  # fmt: skip
    os.close(writer)
    eventually(lambda: is_full(reader))
    (launcher.folder / "full").touch()
    eventually(lambda: len(launcher.processes()) == 2, within_s=5)  # the launcher and its guardian
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    assert job.wait(10) == 3
    assert "lamina run: rank 1 failed: exit code 3\n" in text and "the reason\n" in text
