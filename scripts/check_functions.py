# SPDX-License-Identifier: Apache-2.0
"""Names the functions of more than 60 lines, in all languages and folders; docstrings do not count."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import lizard
from tree import ROOT, tracked

MOST = 60
# Not yet split, with the lines that they have: these become fewer.
LEFT = {
    ("python/lamina/checkpoints/saving.py", "save_checkpoint"): 69,
}
SHELL = re.compile(r"^\s*(?:function\s+)?([\w-]+)\s*\(\)\s*\{(.*?)^\s*\}", re.MULTILINE | re.DOTALL)
CMAKE = re.compile(
    r"^\s*(?:function|macro)\s*\(\s*(\w+)(.*?)^\s*end(?:function|macro)\b", re.MULTILINE | re.DOTALL | re.IGNORECASE
)


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
        name = found.name.removeprefix("lamina::").split("::", 1)[-1]
        yield found.start_line, name, found.end_line - found.start_line + 1


def script_functions(text: str, function: re.Pattern[str]) -> Iterator[tuple[int, str, int]]:
    for found in function.finditer(text):
        yield text.count("\n", 0, found.start(1)) + 1, found[1], found[0].strip().count("\n") + 1


def functions(path: Path) -> Iterator[tuple[int, str, int]]:
    if path.suffix in (".h", ".cc"):
        return cpp_functions(path)
    text = path.read_text()
    return (
        python_functions(text)
        if path.suffix == ".py"
        else script_functions(text, SHELL if path.suffix == ".sh" else CMAKE)
    )


def main() -> int:
    problems = [
        f"{name}:{line}: {function} has {lines} lines, {MOST} are the most: split it"
        for name in tracked(".h", ".cc", ".py", ".sh", ".cmake", ".txt")
        for line, function, lines in functions(ROOT / name)
        if lines > LEFT.get((str(name), function), MOST)
    ]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
