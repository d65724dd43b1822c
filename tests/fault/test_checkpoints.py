# SPDX-License-Identifier: Apache-2.0
"""Saves of checkpoints that meet a fault: what is there afterwards is one save, whole, and nobody waits in vain."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fault.test_rank_killed import BOUND_S, read, survivors
from launch.forked_ranks import made_once
from launch.launcher_harness import PRELOAD, PRELOAD_COMPILER, command, eventually, require_success
from soak import SOAK, some

CHECKPOINTS = Path(__file__).with_name("checkpoints.py")
LAYOUTS = [(2, 2), (2, 1), (4, 2), (4, 1)]  # ranks, partitions
FATAL = 3


def compile_disk(library):
    source = Path(__file__).with_name("disk.cc")
    subprocess.run(["c++", "-std=c++20", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)


@pytest.fixture(scope="session")
def disk():
    """A function that gives the environment of a job whose disk fails or is slow, by disk.cc: there below a folder; or
    that loses its first rank at a call of the system's."""
    library = made_once("disk.so", compile_disk)

    def environment(folder, how, after, rank=-1, killed_at=None):
        kill = {"LAMINA_TEST_KILL": f"0 {killed_at}"} if killed_at else {}
        return {"LD_PRELOAD": str(library), "LAMINA_TEST_DISK": f"{rank} {how} {after} {folder}"} | kill

    return environment


def start(launcher, *words, flags=PRELOAD_COMPILER, **options):
    """A job of two ranks that `lamina run` starts, where what it does is part of the test."""
    return launcher.start("run", *flags, "-n", 2, CHECKPOINTS, *words, **options)


def checkpoints(launcher):
    return launcher.folder / "checkpoints"


def noted(launcher, name, ranks):
    """The largest number that a rank has noted."""
    files = [launcher.folder / f"{name}.{rank}" for rank in range(ranks)]
    return max((int(json.loads(file.read_text())["text"]) for file in files if file.exists()), default=0)


def verify(launcher, tag=""):
    words = [command(), "checkpoint", "verify", str(checkpoints(launcher)), *([tag] if tag else [])]
    verified = subprocess.run(words, capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr + verified.stdout


def require_one_save(launcher, ranks, partitions, least, most, *width):
    """The newest checkpoint is one of the saves between, the next job goes on from it, and nothing else is left."""
    verify(launcher)
    require_success(launcher.start_ranks(ranks, CHECKPOINTS, "next_job", partitions, 60, *width))
    found, _, names = read(launcher, "found.0")["text"].partition(" ")
    assert least <= int(found) <= most
    assert not re.search(r"\.(tmp|old)-|\.lock|\.newest", names), names


def place_met(launcher):
    """Says by what is there how far the first rank was in a save when it was killed; the others' ends are undone."""
    names = sorted(path.name for path in checkpoints(launcher).iterdir())
    for unfinished in checkpoints(launcher).glob("*.tmp-*"):
        if unfinished.name.endswith(".tmp-pruned"):
            return "pruning"
        manifest = unfinished / "manifest.json"
        if not manifest.exists():
            return "pieces"
        newer = checkpoints(launcher) / unfinished.name.split(".tmp-")[0] / "manifest.json"
        is_replaced = newer.exists() and newer.stat().st_mtime_ns > manifest.stat().st_mtime_ns
        return "replaced" if is_replaced else "manifest"
    if any(name.endswith(".newest") for name in names):
        return "newest"
    return "a claim" if any(name.endswith(".lock") for name in names) else "none"


def drawn(number):
    """A layout, who is killed, when, and how it saves; the same for the same number."""
    draw = random.Random(f"checkpoint {number}")
    ranks, partitions = draw.choice(LAYOUTS)
    victim = draw.choice([-1, 0, draw.randrange(ranks)])  # the first rank commits
    how = draw.choice(["synchronous", "asynchronous"]), draw.choice(["one", "new"])
    return ranks, partitions, victim, round(1.2 * draw.random(), 3), *how


@pytest.mark.parametrize(
    ("ranks", "partitions", "victim", "fraction", "how", "tags"),
    [drawn(number) for number in range(100 if SOAK else 4)],
)
def test_a_kill_at_any_instant_leaves_the_save_before_or_this_one(
    ranks, partitions, victim, fraction, how, tags, launcher, record_property
):
    started = launcher.start_ranks(ranks, CHECKPOINTS, "killed", partitions, 60, victim, fraction, how, tags)
    if victim < 0:
        for rank in started:
            rank.communicate(timeout=60)
    else:
        for _, error, _ in survivors(launcher, started, victim):
            assert re.search(rf"rank {victim} (is|was) lost", error), error
    saved, begun = noted(launcher, "saved", ranks), noted(launcher, "begun", ranks)
    record_property("met", f"{place_met(launcher)} of {begun}, after {saved}")  # of the report of a soak
    assert saved >= FATAL - 1
    require_one_save(launcher, ranks, partitions, saved, begun)


# The first rank's call of the system, its path, the tags, and what is then there. The bytes of a file were written when
# it is synced.
CALLS = [
    ("write", "*/save-3_partial.tmp-*/seen", "new", "pieces"),
    ("write", "*/save-3_partial.tmp-*.safetensors", "new", "pieces"),
    ("fsync", "*/save-3_partial.tmp-*/optimizer-*.safetensors", "new", "pieces"),
    ("write", "*/save-3_partial.tmp-*/manifest.json", "new", "manifest"),
    ("fsync", "*/save-3_partial.tmp-*/manifest.json", "new", "manifest"),
    ("rename", "*/save-3_partial.tmp-*", "new", "manifest"),
    ("renameat2", "*/last_partial.tmp-*", "one", "manifest"),
    ("unlinkat", "*/last_partial.tmp-*", "one", "replaced"),
    ("write", "*/save-3_partial.newest", "new", "manifest"),
    ("rename", "*/save-3_partial.newest", "new", "newest"),
    ("rename", "*/save-1_partial", "new", "a claim"),
    ("unlinkat", "*/save-1_partial.tmp-pruned/*", "new", "pruning"),
]


@pytest.mark.parametrize(("call", "path", "tags", "met"), some(CALLS, 4, seed=5))
@pytest.mark.parametrize("how", some(["synchronous", "asynchronous"], 1))
def test_a_kill_of_the_first_rank_at_any_call_leaves_the_save_before_or_this_one(
    call, path, tags, met, how, launcher, disk
):
    nobody = -2
    environment = disk(checkpoints(launcher), 0, 1000, killed_at=f"{call} {path}")
    started = launcher.start_ranks(2, CHECKPOINTS, "killed", 1, 60, nobody, 0, how, tags, env=environment)
    outputs = [rank.communicate(timeout=60)[1] for rank in started]
    assert started[0].returncode == -signal.SIGKILL, outputs
    assert place_met(launcher) == met
    require_one_save(launcher, 2, 1, noted(launcher, "saved", 2), noted(launcher, "begun", 2))


def slowly(launcher, disk, megabytes=10):
    return {"env": disk(checkpoints(launcher), 0, round(1000 * megabytes))}


@pytest.mark.parametrize(("ranks", "victim"), some([(2, 0), (2, 1), (4, 2)], 1, seed=1))
def test_a_rank_that_is_frozen_while_it_saves_is_named_after_timeout_s(ranks, victim, launcher, disk):
    timeout_s = 4.0
    job = launcher.start_ranks(
        ranks, CHECKPOINTS, "frozen", 1, timeout_s, victim, **slowly(launcher, disk, 20 // ranks)
    )
    try:
        others = set(range(ranks)) - {victim}
        eventually(lambda: all((launcher.folder / f"error.{rank}").exists() for rank in others))
        frozen = read(launcher, f"death.{victim}")["at"]
        for rank in others:
            error = read(launcher, f"error.{rank}")
            assert error["text"].startswith("TimeoutError") and f"rank {victim}" in error["text"], error
            assert timeout_s - 1 < error["at"] - frozen < timeout_s + BOUND_S, error
    finally:
        for rank in job:
            rank.kill()
            rank.communicate()
    verify(launcher, "save-1")


def test_a_rank_that_does_something_else_is_named_within_2_s(launcher):
    started = launcher.start_ranks(2, CHECKPOINTS, "absent", 2, 60, 1, "elsewhere")
    for rank in started:
        rank.communicate(timeout=60)
    for rank in range(2):
        error = read(launcher, f"error.{rank}")
        assert f"rank {1 - rank}" in error["text"] and "lamina.barrier()" in error["text"], error
        assert error["at"] - max(read(launcher, f"begun.{each}")["at"] for each in range(2)) < 2.0


def test_a_rank_that_never_saves_is_named_after_timeout_s(launcher):
    timeout_s = 3.0
    started = launcher.start_ranks(2, CHECKPOINTS, "absent", 2, timeout_s, 1, "nowhere")
    try:
        started[0].communicate(timeout=60)
        error = read(launcher, "error.0")
        assert error["text"].startswith("TimeoutError") and "rank 1" in error["text"], error
        assert timeout_s - 1 < error["at"] - read(launcher, "begun.0")["at"] < timeout_s + BOUND_S
    finally:
        started[1].kill()
        started[1].communicate()


# How it saves, the megabytes that a rank writes in a second, and --hang-timeout.
@pytest.mark.parametrize(("how", "rate", "hang_s"), [("synchronous", 0.35, 20), ("asynchronous", 3, 60)])
def test_a_slow_save_that_makes_progress_is_neither_a_timeout_nor_a_hang(how, rate, hang_s, launcher, disk):
    timeout_s = 6
    flags = *PRELOAD, "--hang-timeout", hang_s
    job = start(launcher, "slow", 1, timeout_s, how, flags=flags, **slowly(launcher, disk, rate))
    _, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    took, steps = map(float, read(launcher, "took.0")["text"].split())
    assert took > (hang_s if how == "synchronous" else timeout_s)
    assert how == "synchronous" or steps > 3
    verify(launcher)


def slowly_read(launcher, disk, megabytes):
    return {"env": disk(checkpoints(launcher), -1, round(1000 * megabytes))}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_others_read_is_named_by_them_within_2_s(victim, launcher, disk):
    started = launcher.start_ranks(2, CHECKPOINTS, "reading", 1, 60, victim, **slowly_read(launcher, disk, 10))
    for _, error, _ in survivors(launcher, started, victim):
        assert f"rank {victim} is lost" in error, error


def test_a_slow_load_that_makes_progress_is_no_hang(launcher, disk):
    hang_s, nobody = 20, -2
    flags = *PRELOAD, "--hang-timeout", hang_s
    job = start(launcher, "reading", 1, 60, nobody, flags=flags, **slowly_read(launcher, disk, 1.3))
    _, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    assert float(read(launcher, "took.0")["text"]) > hang_s


def test_the_second_job_that_saves_into_a_tag_is_told_who_holds_it(launcher, disk):
    first = launcher.start_ranks(2, CHECKPOINTS, "two", 1, 60, "first", **slowly(launcher, disk))
    require_success(first + launcher.start_ranks(2, CHECKPOINTS, "two", 1, 60, "second"))
    for rank in range(2):
        refused = read(launcher, f"refused.{rank}")["text"]
        assert re.search(r"save-1_partial is being saved by rank 0, process \d+ on ", refused), refused
    for tag in "save-1", "save-2":
        verify(launcher, tag)


def test_a_program_that_ends_finishes_its_save(launcher, disk):
    require_success(launcher.start_ranks(2, CHECKPOINTS, "leaves", 1, 60, "well", **slowly(launcher, disk)))
    verify(launcher, "save-2")


def test_a_program_that_fails_drops_its_save(launcher, disk):
    for rank in launcher.start_ranks(2, CHECKPOINTS, "leaves", 1, 60, "error", **slowly(launcher, disk)):
        _, errors = rank.communicate(timeout=200)
        assert rank.returncode == 1 and "ValueError: the script's own" in errors, errors
    require_one_save(launcher, 2, 1, 1, 1, 1024)


def test_ctrl_c_in_a_save_ends_the_ranks_and_leaves_the_save_before(launcher, disk):
    job = start(launcher, "interrupted", 1, 60, **slowly(launcher, disk))
    unfinished = checkpoints(launcher)
    eventually(lambda: list(unfinished.glob("save-2_partial.tmp-*/*.safetensors")))
    sent = time.time()
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=200)
    assert job.returncode == 130, errors
    assert time.time() - sent < BOUND_S, errors
    require_one_save(launcher, 2, 1, 1, 1, 1024)


def require_failed(launcher, ranks, *words):
    """All ranks have met the same error, in a synchronous save and in an asynchronous one, and went on. Returns it."""
    texts = [read(launcher, f"failed.{rank}")["text"].split("\n") for rank in range(ranks)]
    for each in texts:
        assert len(each) == 2, texts
        for error in each:
            for word in words:
                assert word in error, texts
    assert len({re.sub(r"\.tmp-\w+|\d+ bytes are free", "", each[0]) for each in texts}) == 1, texts
    verify(launcher, "save-1")
    verify(launcher, "save-3")
    return texts[0][0]


AFTER = [0, 100_000, 1_000_000]
ERRORS = [(code, after, rank) for code in ("EIO", "EDQUOT", "ENOSPC") for after in AFTER for rank in (0, 1)]


@pytest.mark.parametrize(("code", "after", "rank"), some(ERRORS, 2, seed=3))
def test_a_disk_that_fails_is_the_same_error_on_all_ranks_and_training_goes_on(code, after, rank, launcher, disk):
    number, folder = getattr(errno, code), launcher.folder / "bad"
    require_success(
        launcher.start_ranks(2, CHECKPOINTS, "failing", 1, 60, folder, env=disk(folder, number, after, rank))
    )
    error = require_failed(launcher, 2, str(folder), os.strerror(number), f"on rank {rank}")
    assert code == "EIO" or re.search(r"\d+ bytes to write, \d+ bytes are free", error), error
    assert [path.name for path in folder.iterdir() if not path.name.endswith(".lock")] == []


def test_a_folder_that_may_not_be_written_is_the_same_error_on_all_ranks(launcher):
    folder = launcher.folder / "file"
    folder.write_text("")  # root may write anything else
    require_success(launcher.start_ranks(2, CHECKPOINTS, "failing", 1, 60, folder / "checkpoints"))
    require_failed(launcher, 2, str(folder), os.strerror(errno.ENOTDIR))


def test_a_disk_that_is_too_small_is_told_before_a_byte_is_written(launcher):
    folder = launcher.folder / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a small disk")
    try:
        for rank in launcher.start_ranks(2, CHECKPOINTS, "failing", 1, 60, folder):
            _, errors = rank.communicate(timeout=200)
            assert rank.returncode == 1, errors
        error = read(launcher, "error.1")["text"]
        assert re.search(rf"{folder}: the checkpoint needs \d+ bytes, and \d+ are free", error), error
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", folder], check=True)
        shutil.rmtree(folder)
