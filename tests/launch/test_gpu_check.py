# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check`: each stage within its limit, and all that was found on the page, whatever comes next."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from docs.raised import ROOT
from launch import launcher_harness

SCRIPT = ROOT / "scripts/gpu_check.sh"
PROGRAMS = ROOT / "scripts/gpu_check"
FROM_DEVICE_TO_DEVICE = "tensors go from device to device, as memory of kind cuda, from rank 0"


class Check:
    """Runs the script over a table of stages, on a machine whose Python names a device."""

    def __init__(self, folder):
        self.page = folder / "check.md"
        self._table = folder / "stages"
        python = folder / "bin/python"
        python.parent.mkdir()
        python.write_text("#!/bin/sh\necho a device\n")
        python.chmod(0o755)
        self._environment = os.environ | {"LAMINA_VENV": str(folder), "OUT": str(self.page)}

    def run(self, table, *words, **variables):
        self._table.write_text(table)
        environment = self._environment | {"STAGES_FILE": str(self._table)} | variables
        return subprocess.run(
            [SCRIPT, *words], env=environment, capture_output=True, text=True, timeout=launcher_harness.DEADLINE_S
        )

    def headings(self):
        return re.findall("^## (.*)$", self.page.read_text(), re.MULTILINE)


@pytest.fixture
def check(tmp_path):
    return Check(tmp_path)


def test_a_stage_that_passes_is_on_the_page_before_the_next_one_begins(check):
    done = check.run("# a table\n\nA.one 20 there echo first\nA.two 20 there grep 'A.one: passed' $OUT\n")
    assert done.returncode == 0, done.stderr
    page = check.page.read_text()
    assert "a device" in page and "    first\n" in page and "2 stages ran, 0 are not there, 0 failed\n" in page
    assert [re.sub(r"\d+ s of", "N s of", line) for line in check.headings()] == [
        "A.one: passed, rc 0, N s of 20",
        "A.two: passed, rc 0, N s of 20",
    ]


def test_a_stage_that_fails_leaves_its_last_lines_and_the_next_one_runs(check):
    done = check.run("A.one 20 there seq 100; exit 3\nA.two 20 there true\n")
    assert done.returncode == 1
    page = check.page.read_text()
    assert "A.one: failed, rc 3," in page and "A.two: passed" in page
    assert "    100\n" in page and "    61\n" in page and "    60\n" not in page
    assert "2 stages ran, 0 are not there, 1 failed: A.one" in done.stderr


def test_a_stage_at_its_limit_is_ended_with_all_that_it_has_started(check, tmp_path):
    wait = f"echo begun; sh -c 'echo $$ >{tmp_path}/pid; exec sleep 61'; true"
    done = check.run(f"A.slow 1 there {wait}\nA.next 20 there true\n")
    assert done.returncode == 1
    page = check.page.read_text()
    assert "A.slow: not over after 1 s, rc 124," in page and "    begun\n" in page and "A.next: passed" in page
    pid = (tmp_path / "pid").read_text().strip()
    launcher_harness.eventually(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_stage_whose_slice_has_not_landed_says_so_and_is_no_failure(check):
    done = check.run("A.one 20 there true\nD.two 20 absent false\n")
    assert done.returncode == 0, done.stderr
    assert check.headings()[1:] == ["D.two: not there"]
    assert "1 stages ran, 1 are not there, 0 failed" in done.stderr


def test_a_stage_that_finds_nothing_to_run_says_so_and_is_no_failure(check):
    done = check.run("F.lanes 20 there echo not built; exit 77\nG.next 20 there true\n")
    assert done.returncode == 0, done.stderr
    assert check.headings()[0].startswith("F.lanes: not here, rc 77,") and "    not built\n" in check.page.read_text()
    assert "1 stages ran, 1 are not there, 0 failed" in done.stderr


def test_all_of_it_ends_within_the_time_that_is_given_and_names_what_there_was_none_for(check):
    table = "A.one 20 there sleep 61\nB.one 20 there true\n"
    done = check.run(table, WITHIN_S="2")
    assert done.returncode == 1
    first, second = check.headings()
    assert first.startswith("A.one: not over after ") and second == "B.one: no time is left of 2 s"
    assert "1 stages ran, 0 are not there, 2 failed: A.one B.one" in done.stderr


def test_words_choose_stages_by_how_their_names_begin(check):
    table = "A.one 20 there true\nB.one 20 there true\nB.two 20 there true\n"
    assert check.run(table, "A", "B.two").returncode == 0
    assert [line.partition(":")[0] for line in check.headings()] == ["A.one", "B.two"]
    done = check.run(table, "X")
    assert done.returncode == 1 and "no stage begins with: X" in done.stderr


@pytest.mark.parametrize(
    ("asked", "said"),
    [("cpu", "there is no GPU here"), ("nonsense", "LAMINA_DEVICE=nonsense: No module named 'nonsense'")],
)
def test_without_the_device_it_says_so_and_runs_nothing(check, asked, said):
    done = check.run("A.one 20 there true\n", LAMINA_DEVICE=asked, LAMINA_VENV="none", PYTHON=sys.executable)
    assert done.returncode == 1 and said in done.stderr and "nothing was checked" in done.stderr
    assert not check.page.exists()


def test_every_stage_of_the_table_has_a_limit_and_a_program():
    rows = [
        line.split(maxsplit=3) for line in (PROGRAMS / "stages").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    assert len({name for name, *_ in rows}) == len(rows)
    for name, limit, state, command in rows:
        assert re.fullmatch(r"[A-G]\.[a-z_]+", name) and 0 < int(limit) <= 600 and state in ("there", "absent"), name
        programs = re.findall(r"\$CHECK/(\S+)", command)
        assert programs or state == "absent", name
        assert all((PROGRAMS / program).is_file() for program in programs), name


@pytest.mark.parametrize(
    ("device", "command", "code", "words"),
    [
        ("cuda", f"echo {FROM_DEVICE_TO_DEVICE} to rank 1", 0, ""),
        ("cuda", f"echo {FROM_DEVICE_TO_DEVICE} to no rank", 1, "WRONG: no rank said"),
        ("cuda", "echo this UCX knows no memory of kind cuda", 77, "not here: a UCX"),
        ("cuda", "false", 1, ""),
        ("emulated", "echo devices lend no memory, so their tensors go through the host", 0, ""),
        ("emulated", "echo nothing", 1, "WRONG: no rank said"),
    ],
)
def test_lanes_are_those_that_the_ranks_say_they_have(device, command, code, words):
    done = subprocess.run(
        [PROGRAMS / "lanes.sh", *command.split()],
        env=os.environ | {"LAMINA_DEVICE": device},
        capture_output=True,
        text=True,
        timeout=launcher_harness.DEADLINE_S,
    )
    assert done.returncode == code and words in done.stdout


@pytest.mark.skipif(not shutil.which("gdb"), reason="there is no debugger here")
def test_a_signal_leaves_the_stacks_of_a_debugger(tmp_path):
    program = tmp_path / "falls.py"
    program.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    variables = {"PYTHON": sys.executable, "LAMINA_COMMAND": launcher_harness.command()}
    words = [PROGRAMS / "ranks.sh", "2", program]
    done = subprocess.run(
        words, env=os.environ | variables, capture_output=True, text=True, timeout=launcher_harness.DEADLINE_S
    )
    said = done.stdout + done.stderr
    assert done.returncode == 128 + 11, said
    assert "rc 139: a signal; once more below" in said
    assert re.search(r"^.*#\d+ .* in .*kill", said, re.MULTILINE), said
