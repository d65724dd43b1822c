# SPDX-License-Identifier: Apache-2.0
"""Docstrings of the Trainer and of what goes with it: all arguments have their line."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lamina

FOLDER = Path(lamina.__file__).parent
FEW = 2  # arguments that a sentence tells


def named_in(docstring: str) -> list[str]:
    """The names in its section of arguments."""
    section = docstring.partition("Args:\n")[2]
    return [
        name for line in re.findall(r"^ +([a-z_0-9]+(?:, [a-z_0-9]+)*): ", section, re.M) for name in line.split(", ")
    ]


@pytest.mark.parametrize("what", [lamina.Trainer, lamina.Trainer.fit, lamina.Trainer.eval, lamina.Trainer.predict])
def test_a_trainer_tells_of_all_its_arguments(what):
    arguments = [name for name in inspect.signature(what).parameters if name != "self"]
    assert set(arguments) <= set(named_in(inspect.getdoc(what)))


def public(tree: ast.AST) -> Iterator[tuple[str, ast.FunctionDef, str | None]]:
    """Functions and methods, with the docstring that tells of their arguments."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node, ast.get_docstring(node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and not (each.name.startswith("_") and each.name != "__init__"):
                    docstring = ast.get_docstring(node if each.name == "__init__" else each)
                    yield f"{node.name}.{each.name}", each, docstring


@pytest.mark.parametrize("package", ["trainer", "composer"])
def test_a_public_function_of_three_arguments_tells_of_them(package):
    silent = []
    for path in sorted((FOLDER / package).rglob("*.py")):
        for name, function, docstring in public(ast.parse(path.read_text())):
            given = function.args
            arguments = [
                each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs) if each.arg != "self"
            ]
            is_event = arguments == ["event", "state", "logger"]  # of a callback or an algorithm: one form for all
            inherits = docstring is None  # the base's has them
            if len(arguments) > FEW and not is_event and not inherits and "Args:" not in docstring:
                silent.append(f"{path.name}: {name}")
    assert not silent
