# SPDX-License-Identifier: Apache-2.0
"""Commands that tell: the help, `lamina explain` and `lamina doctor`."""

import json
import re
import sys

import pytest
from launch.launcher_harness import ROOT

PAGE = (ROOT / "docs/errors.md").read_text()


def test_without_a_command_the_help_is_shown(launcher):
    result = launcher.run()
    assert result.returncode == 0 and result.stderr == ""
    assert all(f"\n  {name} " in result.stdout for name in ("run", "plan", "doctor", "explain"))


def test_every_code_of_the_page_is_explained(launcher):
    listed = launcher.run("explain").stdout.split("\n")
    rows = re.findall(r"^\| `([a-z][a-z0-9-]+)` \| (.*?) \| (.*?) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 100
    for code, *_ in rows:
        assert f"  {code}" in listed
    code, *cells = rows[0]
    said = launcher.run("explain", f"[{code}]").stdout
    assert all(cell in said for cell in cells)
    assert "who is to blame" not in said
    assert "InternalError" in launcher.run("explain", "InternalError").stdout


@pytest.mark.multiprocess
def test_a_doctor_finds_a_machine_where_two_ranks_work(launcher):
    result = launcher.run("doctor", "--json", env={"LAMINA_PYTHON": sys.executable})
    facts = json.loads(result.stdout)
    assert result.returncode == 0 and facts["advice"] == [], facts
    ranks = facts["ranks"]
    assert ranks["objects"] is ranks["all_reduce"] is True and ranks["pipeline_step_s"] > 0
    assert "libucp" in ranks["ucx"]["library"] and re.fullmatch(r"1\.\d+\.\d+", ranks["ucx"]["version"])
    assert facts["torch"]["version"].startswith("2.") and facts["system"]["cores"] >= 1


def test_a_doctor_says_what_to_do_without_the_package(launcher):
    python = launcher.folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o700)
    result = launcher.run("doctor", env={"LAMINA_PYTHON": str(python)})
    assert result.returncode == 1
    assert result.stdout.rstrip().split("\n")[-1] == f"there is no torch in {sys.executable}: pip install torch"


def test_a_doctor_prints_numbers_as_numbers(launcher):
    result = launcher.run("doctor", env={"LAMINA_PYTHON": sys.executable, "LAMINA_UCX": "/", "OMP_NUM_THREADS": "1"})
    assert re.search(r"^ +threads +1$", result.stdout, re.MULTILINE), result.stdout


def test_a_trace_of_another_file_is_told_in_a_line(launcher):
    for name, text in {"words": "no JSON", "list": "[1]", "part": '{"otherData": {"program": "lamina"}}'}.items():
        (launcher.folder / name).write_text(text)
        result = launcher.run("trace", launcher.folder / name)
        assert result.returncode == 2 and result.stderr.count("\n") == 1
        assert "not a timeline that lamina wrote" in result.stderr and "json.exception" not in result.stderr


def test_a_doctor_names_a_ucx_that_is_not_there(launcher):
    result = launcher.run("doctor", env={"LAMINA_PYTHON": sys.executable, "LAMINA_UCX": str(launcher.folder)})
    assert result.returncode == 1
    assert "LAMINA_UCX names" in result.stdout.rstrip().split("\n")[-1], result.stdout
