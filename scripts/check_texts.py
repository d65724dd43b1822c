# SPDX-License-Identifier: Apache-2.0
"""Names the texts of Python that the engine says, too: seven words in a row that stand in strings of both, whatever
values are between them. A text that both faces say is a row of lamina/faces/sayings.h, which Python takes by name.
Names that have no row are told as well.
"""

import ast
import re
import sys
from collections.abc import Iterator

from tree import ROOT, tracked

SAYINGS = ROOT / "lamina" / "faces" / "sayings.h"
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
COMMENT = re.compile(r"^\s*//.*$", re.MULTILINE)
WORD = re.compile(r"[\w.`'-]+|\0")
ADDED = re.compile(r"\+[^;{}]*\+")  # a value between two literals
IN_A_ROW = 7
LEFT = ()
VALUE = " \0 "  # between texts: what is computed


def cpp_texts(text: str) -> Iterator[tuple[int, str]]:
    """The string literals, with their lines; those that stand next to each other, or are added, as one."""
    code = COMMENT.sub(lambda found: " " * len(found[0]), text)
    end, begin, said = 0, 0, ""
    for found in LITERAL.finditer(code):
        between = code[end : found.start()].strip()
        if said and ADDED.fullmatch(between):
            said += VALUE
        elif said and between:
            yield code.count("\n", 0, begin) + 1, said
            said = ""
        begin, said, end = begin if said else found.start(), said + found[1], found.end()
    yield code.count("\n", 0, begin) + 1, said


def python_texts(text: str) -> Iterator[tuple[int, str]]:
    """The strings that are no docstrings; of f-strings the words between values."""
    tree = ast.parse(text)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, VALUE.join(part.value for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


def docstrings(text: str) -> set[str]:
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    return {node.value.value for node in nodes if isinstance(node.value, ast.Constant)}


def rows(said: str) -> Iterator[tuple[str, ...]]:
    found = WORD.findall(said.replace("\\n", " ").replace("{}", VALUE))
    words = [word.strip(".'`").lower() for word in found if word != "\0"]
    for place in range(len(words) - IN_A_ROW + 1):
        yield tuple(words[place : place + IN_A_ROW])


def main() -> int:
    engine: dict[tuple[str, ...], str] = {}
    for name in tracked(".h", ".cc", below="lamina"):
        for line, said in cpp_texts((ROOT / name).read_text()):
            engine |= dict.fromkeys(rows(said), f"{name}:{line}")
    known = set(re.findall(r'^    \{"([^"]+)",', SAYINGS.read_text(), re.MULTILINE))
    problems = []
    for name in tracked(".py", below="python/lamina"):
        text = (ROOT / name).read_text()
        documented = docstrings(text)
        for line, said in python_texts(text):
            found = next((row for row in rows(said) if row in engine), None) if said not in documented else None
            if found and not str(name).startswith(LEFT):
                problems.append(f"{name}:{line}: {engine[found]} says it, too: {' '.join(found)}")
        asked = re.findall(r'\b(?:said|refusal)\(\s*"([^"]+)"', text)
        problems += [f"{name}: no row {each} in {SAYINGS.relative_to(ROOT)}" for each in asked if each not in known]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
