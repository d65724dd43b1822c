# SPDX-License-Identifier: Apache-2.0
"""Commands that tell: the help, `lamina explain` and `lamina doctor`."""

import json
import re
import sys

import pytest
from launch.launcher_harness import ROOT

PAGE = (ROOT / "docs/errors.md").read_text()


# Names of the standard library and of packages that our programs, or what they import, may ask for.
STRANGERS = ("json", "tempfile", "platform", "torch", "numpy", "matplotlib", "lamina", "sitecustomize", "socket")


def put_strangers_modules(folder):
    """Modules that stop whoever imports them; returns the file that they leave."""
    for name in STRANGERS:
        (folder / f"{name}.py").write_text(
            f"open({str(folder / 'executed')!r}, 'a').write({name!r})\nraise SystemExit(9)\n"
        )
    return folder / "executed"


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
    executed = put_strangers_modules(launcher.folder)
    result = launcher.run("doctor", "--json", env={"LAMINA_PYTHON": sys.executable})
    assert not executed.exists(), executed.read_text()
    facts = json.loads(result.stdout)
    assert result.returncode == 0 and facts["advice"] == [], facts
    ranks = facts["ranks"]
    assert ranks["objects"] is ranks["all_reduce"] is True and ranks["pipeline_step_s"] > 0
    assert "libucp" in ranks["ucx"]["library"] and re.fullmatch(r"1\.\d+\.\d+", ranks["ucx"]["version"])
    assert facts["torch"]["version"].startswith("2.") and facts["system"]["cores"] >= 1
    assert ("devices" in ranks) == (facts["torch"]["accelerator"] is not None)


def test_a_plan_imports_nothing_of_the_current_folder_but_the_model(launcher):
    executed = put_strangers_modules(launcher.folder)
    (launcher.folder / "own.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(4, 4)\n")
    words = ("plan", "--model", "own:build", "--input", "torch.zeros(2, 4)", "--partitions", "1", "--microbatches", "1")
    result = launcher.run(*words, env={"LAMINA_PYTHON": sys.executable})
    assert result.returncode == 0 and not executed.exists(), result.stderr


def test_an_interpreter_that_all_users_may_replace_is_refused(launcher):
    folder = launcher.folder / "open"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    folder.chmod(0o777)
    result = launcher.run("doctor", env={"LAMINA_PYTHON": str(folder / "python")})
    assert result.returncode == 2 and "LAMINA_PYTHON names code that others may have put there" in result.stderr


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
