# SPDX-License-Identifier: Apache-2.0
"""docs/planning.md: its commands do what it says."""

import os
import re
import subprocess
import sys

import pytest
from docs.raised import ROOT
from launch.launcher_harness import command

PAGE = (ROOT / "docs/planning.md").read_text()
MODELS = """
import torch
from torch import nn
class build(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layers = nn.Embedding(9, 8), nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
    def forward(self, tokens, labels):
        return self.layers(self.words(tokens))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x):
        return self.down(self.up(x).relu())
def sliced():
    import lamina
    model = nn.Sequential()
    model.layers = nn.Sequential(*[Block() for _ in range(8)])
    lamina.set_tensor_parallelism(model, plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"})
    return model
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/models.py").write_text(MODELS)
    (tmp_path / "model.json").write_text(re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1])
    (tmp_path / "lamina").write_text(f'#!/bin/sh\nexec {command()} "$@"\n')
    (tmp_path / "lamina").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LAMINA_PYTHON": sys.executable}

    def run(line):
        return subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)

    return run


def test_a_model_is_planned_as_the_page_has_it(run):
    (line,) = re.findall(r"```sh\n(.*)\n```", PAGE)
    done = run(line)
    assert done.returncode == 0, done.stderr
    assert all(f"{partition}: [" in done.stdout.splitlines()[0] for partition in range(4))
    assert run(line.replace("--input labels=None", "")).returncode == 2, "it needs labels"


def test_the_file_of_the_page_is_one(run):
    line, _ = re.findall(r"^\$ (lamina plan .*)$", PAGE, re.MULTILINE)
    done = run(line)
    assert done.returncode == 0 and done.stdout.startswith("Partition assignments: {0: ["), done.stderr


def test_layers_are_cut_as_the_page_has_it(run):
    _, (line, lines) = re.findall(r"^\$ (lamina plan .*)\n(?:\.\.\.\n)?((?:.+\n)*?)```", PAGE, re.MULTILINE)
    done = run(line)
    assert done.returncode == 0 and done.stdout.endswith(lines), done.stdout + done.stderr
