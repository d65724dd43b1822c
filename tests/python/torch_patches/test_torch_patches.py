# SPDX-License-Identifier: Apache-2.0
"""The table in lamina.torch_patches has all that lamina replaces of torch's, and nothing else."""

import ast
import re
from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD
from python.torch_patches.replaced import Torchs
from torch import nn

import lamina
from lamina.torch_patches import scoped

PACKAGE = Path(__file__).parents[3] / "python" / "lamina"
PROGRAM = Path(__file__).with_name("patched.py")


def of_torch(tree: ast.AST) -> set[str]:
    """The names by which a file knows torch, and what it has from there."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or "torch" for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def replaced(node: ast.AST) -> list[ast.AST]:
    """Returns the object of which a statement or call sets or deletes an attribute."""
    if isinstance(node, ast.Assign | ast.Delete):
        return [target.value for target in node.targets if isinstance(target, ast.Attribute)]
    if isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Attribute):
        return [node.target.value]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
        return node.args[:1]
    return []


def root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "torch_patches"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_nobody_else_replaces_something_of_torchs(path):
    tree = ast.parse(path.read_text())
    torchs = of_torch(tree)
    lines = [node.lineno for node in ast.walk(tree) for owner in replaced(node) if root(owner) in torchs]
    assert not lines


def test_what_a_job_replaces_is_in_the_table_and_is_torchs_again_after_it(launcher):
    run = launcher.run("run", *PRELOAD, "-n", 2, PROGRAM)
    assert run.returncode == 0, run.stderr


def test_what_contexts_replace_is_in_the_table():
    torchs = Torchs()
    with (
        scoped.calls(lambda original, module, args, kwargs: original(module, *args, **kwargs)),
        scoped.attributes(
            lambda original, module, name, value: original(module, name, value),
            lambda module, name: object.__getattribute__(module, name),
        ),
        scoped.functions(lambda original, function, args, kwargs: original(*args, **kwargs)),
        scoped.creations(lambda module: None),
    ):
        nn.Linear(1, 1)
        replaced, told = torchs.replaced(), torchs.rows("For the time of a context")
    assert replaced.keys() == told.keys(), (replaced, told)
    assert not torchs.replaced()


def test_the_table_names_who_replaces():
    named = set(re.findall(r"^\| torch\.\S+ \| (\w+)|\(`(\w+)`\)", lamina.torch_patches.__doc__, re.MULTILINE))
    named = {name for names in named for name in names if name}
    assert named == {path.stem for path in (PACKAGE / "torch_patches").glob("*.py")} - {"__init__"}
