# SPDX-License-Identifier: Apache-2.0
"""`lamina run --timeline FILE` and `lamina trace FILE`."""

import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD, command, eventually

PROGRAM = Path(__file__).with_name("trained.py")
STEPS, MICROBATCHES = 3, 4


def trace(*words, python=sys.executable):
    env = os.environ | {"LAMINA_PYTHON": str(python)}
    return subprocess.run([command(), "trace", *words], capture_output=True, text=True, timeout=60, env=env)


def rows_of(path):
    return json.loads(path.read_text())["traceEvents"]


def slices(rows, rank, category):
    return [row for row in rows if row["ph"] == "X" and row["pid"] == rank and row["cat"] == category]


def draws_a_step(path, folder):
    """`--png` draws each turn of a step, measured and planned; where there is no matplotlib it says so."""
    picture = folder / "step.svg"
    drawn = trace("--png", picture, path)
    assert drawn.returncode == 0, drawn.stderr
    assert drawn.stdout == trace(path).stdout
    kinds = ("forward", "backward", "planned")
    turns = collections.Counter(row["args"]["step"] for row in rows_of(path) if row.get("cat") in kinds)
    assert picture.read_text().count('id="PolyCollection_') in turns.values()
    bare = folder / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    drawn = trace("--png", folder / "other.png", path, python=bare)
    assert drawn.returncode == 2 and "-m pip install matplotlib" in drawn.stderr and drawn.stderr.count("\n") == 1
    assert not (folder / "other.png").exists()


def test_one_file_holds_what_all_ranks_did(launcher, tmp_path):
    path = tmp_path / "new folder" / "timeline.json"
    result = launcher.run("run", *PRELOAD, "-n", 2, "--timeline", path, PROGRAM, STEPS)
    assert result.returncode == 0, result.stderr
    rows = rows_of(path)
    for rank, modules in enumerate([{"step body", "0"}, {"1"}]):
        assert len(slices(rows, rank, "step")) == STEPS
        for category in ("forward", "backward", "planned"):
            turns = slices(rows, rank, category)
            assert {turn["args"]["microbatch"] for turn in turns} == set(range(MICROBATCHES)), (rank, category)
            assert category == "planned" or {turn["name"] for turn in turns} == modules
        assert any(row["ph"] == "C" and row["pid"] == rank and row["args"]["bytes"] > 1 << 20 for row in rows)
    ends = collections.defaultdict(dict)
    for row in rows:
        if row["ph"] in "sf":
            assert row["ph"] not in ends[row["id"]]
            ends[row["id"]][row["ph"]] = row
    assert ends
    for pair in ends.values():
        assert pair["s"]["pid"] != pair["f"]["pid"] and pair["s"]["ts"] <= pair["f"]["ts"]
    assert f"timeline of {STEPS - 1} steps" in result.stderr
    assert trace(path).stdout in result.stderr
    assert [each.name for each in path.parent.iterdir()] == ["timeline.json"]
    draws_a_step(path, tmp_path)


def test_a_job_that_fails_leaves_what_it_did_until_then(launcher, tmp_path):
    path = tmp_path / "timeline.json"
    result = launcher.run("run", *PRELOAD, "-n", 2, "--timeline", path, PROGRAM, 1, "fails")
    assert result.returncode == 1 and "on purpose" in result.stderr
    for rank in range(2):
        assert len(slices(rows_of(path), rank, "step")) == 2
    assert trace(path).returncode == 0


def test_of_a_job_whose_rank_was_killed_the_steps_before_are_left(launcher, tmp_path):
    path = tmp_path / "timeline.json"
    result = launcher.run("run", *PRELOAD, "-n", 2, "--timeline", path, PROGRAM, 1, "dies")
    assert result.returncode == 128 + 9, result.stderr
    for rank in range(2):
        assert 0 in {row["args"]["step"] for row in slices(rows_of(path), rank, "step")}
    assert trace(path).returncode == 0


def test_a_program_without_steps_has_no_timeline(launcher, tmp_path):
    result = launcher.run("run", "-n", 2, "--timeline", tmp_path / "timeline.json", "-c", "true")
    assert result.returncode == 0 and "no rank has recorded a step" in result.stderr
    assert not list(tmp_path.glob("timeline.json*"))


def test_of_a_job_whose_launcher_was_killed_trace_reads_the_parts(launcher, tmp_path):
    path = tmp_path / "timeline.json"
    job = launcher.start("run", *PRELOAD, "-n", 2, "--timeline", path, PROGRAM, 1000)
    eventually(lambda: len(list(tmp_path.glob("timeline.json.*/*.part"))) == 2)
    job.kill()
    job.wait()
    eventually(lambda: not launcher.processes())
    (folder,) = tmp_path.glob("timeline.json.*")
    result = subprocess.run([command(), "trace", folder, "-o", path], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "timeline of" in result.stdout, result.stderr
    assert {row["pid"] for row in rows_of(path)} == {0, 1}
    assert trace(path).stdout == result.stdout


def test_a_timeline_that_cannot_be_written_keeps_its_parts(launcher, tmp_path):
    """Its place is taken while the job runs."""
    path = tmp_path / "timeline.json"
    takes = f"import os, runpy\nos.makedirs({str(path / 'something')!r}, exist_ok=True)\n"
    (tmp_path / "takes.py").write_text(takes + f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n")
    result = launcher.run("run", *PRELOAD, "-n", 2, "--timeline", path, "takes.py", STEPS)
    assert result.returncode == 0
    folder = re.search(r"its parts are kept: `lamina trace -o FILE (\S+)` reads them", result.stderr)[1]
    assert f"timeline of {STEPS - 1} steps" in trace(folder).stdout
    refused = trace(folder, "--png", tmp_path / "step.png")
    assert refused.returncode == 2 and "with -o FILE" in refused.stderr


@pytest.mark.parametrize("place", ["file/timeline.json", "."])
def test_a_place_that_cannot_be_written_is_said_before_anything_starts(launcher, tmp_path, place):
    (tmp_path / "file").write_text("")
    result = launcher.run("run", "--timeline", tmp_path / place, "-c", "touch", tmp_path / "started")
    assert result.returncode == 2 and "--timeline" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_its_place_is_not_followed(launcher, tmp_path, there):
    """Others who may write to the folder can have put it there."""
    precious = tmp_path / "precious"
    if there:
        precious.write_text("precious")
    (tmp_path / "timeline.json").symlink_to(precious)
    result = launcher.run("run", "--timeline", tmp_path / "timeline.json", "-c", "true")
    assert result.returncode == 2 and "it is a link; remove it, or name another file" in result.stderr
    assert not there or precious.read_text() == "precious"


@pytest.mark.parametrize("text", [None, "", '{"traceEvents":[]}'])
def test_trace_says_what_is_no_timeline(tmp_path, text):
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    result = trace(path)
    assert (result.returncode, result.stdout) == (2, "")
    assert str(path) in result.stderr and result.stderr.count("\n") == 1
