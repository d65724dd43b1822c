# SPDX-License-Identifier: Apache-2.0
"""Pages work: their files are written and their commands run, in order, and print what the page shows. Pieces of an
example are pieces of it."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import torch
from docs.raised import ROOT
from launch.forked_ranks import fork_server
from launch.launcher_harness import PRELOAD_COMPILER, command

# Pages, and how many of their commands are run.
PAGES = {"tutorial.md": 10, "coming-from.md": 6, "evaluation.md": 2, "resume.md": 2, "trainer.md": 2}
EXAMPLES = {"evaluation.md": "evaluation.py", "resume.md": "resume.py"}
BLOCK = re.compile(r"^```(.+?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.fixture
def place(tmp_path):
    """A folder with an environment in which `python` and `lamina` are those that are tested. What `python` runs and the
    ranks of `lamina run` are copies of processes that have imported torch, which is most of their time."""
    fork_server(0, os.environ)  # started here, it does not hold the output of a command
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    tools = tmp_path / "tools"
    tools.mkdir()
    of_ranks = 'first=$1; shift; set -- "$first"'
    copies = f'case "$1" in run | verify) {of_ranks} {shlex.join(PRELOAD_COMPILER)} "$@";; esac\n'
    forked = f"{sys.executable} {ROOT / 'tests/launch/forked_python.py'}"
    for name, before, program in (("python", "", forked), ("lamina", copies, command())):
        (tools / name).write_text(f'#!/bin/sh\n{before}exec {program} "$@"\n')
        (tools / name).chmod(0o755)
    path = f"{tools}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    return tmp_path, os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "LAMINA_PYTHON": sys.executable}


def close(shown: str, printed: str, measured: bool) -> bool:
    """True for a line that the page shows: its numbers within a hundredth. Where they are measured, they and
    what comes of them, units and reasons to be idle, are any."""
    if measured:
        shown, printed = (re.split(" (?:waiting|between|start|end|the largest) ", line)[0] for line in (shown, printed))
        shown, printed = (re.sub(r"(?<=\d) ([mu]?s|[KM]iB)\b", " ", line) for line in (shown, printed))
    if NUMBER.sub("0", shown) != NUMBER.sub("0", printed):
        return False
    pairs = zip(map(float, NUMBER.findall(shown)), map(float, NUMBER.findall(printed)), strict=True)
    return measured or all(abs(a - b) <= 0.01 * abs(a) for a, b in pairs)


def missing(shown: str, printed: str, measured: bool) -> list[str]:
    """The lines that the page shows and the command did not print there; `...` stands for any lines."""
    ahead, skip = printed.splitlines(), False
    for line in shown.splitlines():
        if line == "...":
            skip = True
            continue
        while skip and ahead and not close(line, ahead[0], measured):
            ahead.pop(0)
        if not ahead or not close(line, ahead.pop(0), measured):
            return [line]
        skip = False
    return []


def columns(text: str) -> str:
    """As it is, but for how wide the columns of a table are."""
    return re.sub(" +", " ", text)


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_every_block_in_order(page, place):
    folder, env = place
    printed = ran = shown = 0
    for kind, text in BLOCK.findall((ROOT / "docs" / page).read_text()):
        if kind == "python" and page in EXAMPLES:
            assert text in (folder / "examples" / EXAMPLES[page]).read_text()
        elif kind == "python":
            (folder / re.match(r"# (\w+\.py)\n", text)[1]).write_text(text)
        elif kind == "sh":
            run = subprocess.run(
                ["sh", "-ec", text],
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
            )
            assert run.returncode == 0, run.stdout
            printed, ran = columns(run.stdout), ran + 1
        else:
            assert kind in ("text", "text measured")
            # Operations of another torch keep other tensors.
            measured = kind != "text" or not torch.__version__.startswith("2.13.")
            assert not missing(columns(text), printed, measured), printed
            shown += 1
    assert ran == shown == PAGES[page]
