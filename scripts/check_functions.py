# SPDX-License-Identifier: Apache-2.0
"""Names the functions of more than 60 lines, in all languages and folders; docstrings do not count."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import lizard
from tree import ROOT, tracked

MOST = 60
# Not yet split, with the lines that they have: these become fewer.
LEFT = {"bind_checkpoint": 77, "save_checkpoint": 69}


def python_functions(text: str) -> Iterator[tuple[int, str, int]]:
    """The line, the name and the number of lines of each function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            said = node.body[0]
            documented = ast.get_docstring(node) is not None
            docstring = said.end_lineno - said.lineno + 1 if documented else 0
            yield node.lineno, node.name, node.end_lineno - node.lineno + 1 - docstring


def cpp_functions(path: Path) -> Iterator[tuple[int, str, int]]:
    for found in lizard.analyze_file(str(path)).function_list:
        yield found.start_line, found.name, found.end_line - found.start_line + 1


def main() -> int:
    problems = []
    for name in tracked(".h", ".cc", ".py"):
        path = ROOT / name
        found = python_functions(path.read_text()) if name.suffix == ".py" else cpp_functions(path)
        problems += [
            f"{name}:{line}: {function} has {lines} lines, {MOST} are the most: split it"
            for line, function, lines in found
            if lines > LEFT.get(function.removeprefix("lamina::").split("::", 1)[-1], MOST)
        ]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
