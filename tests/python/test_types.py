# SPDX-License-Identifier: Apache-2.0
"""Types for checkers: mypy passes over the examples, and finds what is wrong in scripts."""

import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from docs.raised import ROOT
from soak import SOAK

import lamina
from lamina import _lamina
from lamina.job.keys import Keys

CONFIGURATION = """
[mypy]
check_untyped_defs = true
[mypy-torchdata.*,rich.*]
ignore_missing_imports = true
[mypy-transformers.*]
follow_imports = skip
"""
# Torch as far as types of ours depend on it: its own take mypy half a minute, and are looked at in a soak.
ANYTHING = "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n"
OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "matmul", "lt", "gt", "getitem")
TENSOR = "class Tensor:\n    def __getattr__(self, name: str) -> Any: ...\n" + "".join(
    f"    def __{each}__(self, other: Any) -> Any: ...\n" for each in OPERATORS
)


def write_stubs_of_torch(folder: Path) -> None:
    for package in ("torch", "torch/nn", "torch/utils", "torch/utils/data"):
        (folder / package).mkdir()
        (folder / package / "__init__.pyi").write_text(ANYTHING)
    (folder / "torch/__init__.pyi").write_text(f"{ANYTHING}{TENSOR}def ones(*size: int) -> Tensor: ...\n")
    (folder / "torch/nn/functional.pyi").write_text(ANYTHING)


TYPED = """
import lamina
import torch

lamina.init(partitions=2, schedule="interleaved")


@lamina.step
def train(x: torch.Tensor, rate: float = 0.1) -> torch.Tensor:
    return x


@lamina.step(non_split_inputs=["y"])
def both(x: torch.Tensor, y: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x


@lamina.step
def nothing(x: torch.Tensor) -> None:
    pass


class Training:
    @lamina.step
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x


x = torch.ones(2)
loss: torch.Tensor = train(x, rate=0.2).reduce_mean()
first, second = both(x, 1)
first.concat()
Training().step(x).stack()
"""
# A line each that is an error, and what mypy says of it.
WRONG = {
    "train()": 'All overload variants of "__call__" of "StepFunction" require',
    "train(x, rat=1)": 'No overload variant of "__call__" of "StepFunction"',
    "Training().step()": 'All overload variants of "__call__" of "StepFunction" require',
    "nothing(x).reduce_mean()": '"None" has no attribute "reduce_mean"',
    "lamina.init(partition=2)": 'Unexpected keyword argument "partition" for "init"; did you mean "partitions"',
    'lamina.init(partitions="2")': 'Argument "partitions" to "init" has incompatible type "str"',
    'lamina.init(schedule="one")': 'Argument "schedule" to "init" has incompatible type',
}


@pytest.fixture(scope="module")
def mypy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("types")
    (folder / "mypy.ini").write_text(CONFIGURATION)
    if not SOAK:
        write_stubs_of_torch(folder)
    words = [sys.executable, "-m", "mypy", "--config-file", folder / "mypy.ini", "--cache-dir", folder / "cache"]

    def check(*files, cwd=folder) -> list[str]:
        done = subprocess.run(
            [*words, *files],
            cwd=cwd,
            env=os.environ | {"MYPYPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode < 2, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if ": error: " in line]

    return check


def test_mypy_passes_over_the_examples_and_fails_on_a_forgotten_argument(mypy, tmp_path):
    examples = sorted((ROOT / "examples").glob("*.py"))
    assert mypy(*examples, cwd=ROOT / "examples") == []
    text = (ROOT / "examples/evaluation.py").read_text()
    (tmp_path / "forgets.py").write_text(text.replace("train_step(x, y)\n    ", "train_step(x)\n    "))
    (error,) = mypy(tmp_path / "forgets.py")
    assert 'No overload variant of "__call__" of "StepFunction"' in error


def test_mypy_knows_parameters_results_and_keys(mypy, tmp_path):
    (tmp_path / "typed.py").write_text(TYPED + "\n".join(WRONG))
    errors = mypy(tmp_path / "typed.py")
    begin = TYPED.count("\n") + 1
    found = {int(re.search(r"\.py:(\d+): ", error)[1]) - begin: error for error in errors}
    assert sorted(found) == list(range(len(WRONG))), errors
    for place, says in enumerate(WRONG.values()):
        assert re.search(re.escape(says).replace(r"\.\*", ".*"), found[place]), found[place]


HINTS = typing.get_type_hints(Keys)
FORMS = {"enabled", "parameters"}  # of a dictionary that holds the keys
ALIASES = {"pipeline": "schedule", "pipeline_parallel_degree": "partitions"}


def test_the_keys_of_init_are_those_of_the_engine():
    config, _, _ = _lamina.parse_config("{}")
    assert config.partitions == 1, "its keys become attributes at the first use"
    assert set(vars(config)) == set(HINTS) - FORMS - set(ALIASES)
    assert all(HINTS[alias] == HINTS[name] for alias, name in ALIASES.items())


def choices(hint: object) -> list[object]:
    """The values of a Literal, also of one beside None."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [value for each in typing.get_args(hint) for value in choices(each)]


@pytest.mark.parametrize("key", [key for key, hint in HINTS.items() if choices(hint)])
def test_the_words_of_a_key_are_those_of_the_engine(key):
    for word in choices(HINTS[key]):
        _lamina.parse_config(json.dumps({key: word, "ddp": True}))
    with pytest.raises(lamina.ConfigError) as caught:
        _lamina.parse_config(json.dumps({key: "no such word"}))
    told = str(caught.value).split("expected ")[1]
    assert set(re.findall(r'"(\w+)"', told)) == set(choices(HINTS[key])), told
