# SPDX-License-Identifier: Apache-2.0
"""The sentences of the tree: of comments that have their lines for themselves, of docstrings, and of documents. Code,
tables and columns among them are no sentences."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tree import ROOT

MARKS = {".h": "//", ".cc": "//", ".py": "#", ".pyi": "#", ".sh": "#", ".cmake": "#", ".txt": "#"}
BEGINS = r"[A-Z`\"'(*\[]|\d|[a-z_]+(?:\(|::)|(?:lamina|torch|scikit)\b"
SPLIT = re.compile(rf"(?<=[.!?])[\"')\]]*\s+(?={BEGINS})|(?<=[.:;])\s+(?=\w+(?:, \w+)*: )")
ITEM = re.compile(r"^\s*(?:[-*]|[1-9]\.)\s+")
COLUMNS = re.compile(r"\S {3,}\S")


@dataclass
class Sentence:
    line: int  # where its paragraph begins
    text: str
    first: bool  # begins a comment or docstring


def comments(text: str, mark: str) -> Iterator[tuple[int, list[str]]]:
    """The lines of each block of comments, with the number of the first."""
    lines: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        before, found, said = line.strip().partition(mark)
        if found and not before and not said.strip().startswith("SPDX"):  # a sentence may follow the licence
            lines.append(said.lstrip("/!#").removeprefix(" "))
        elif lines:
            yield number - len(lines), lines
            lines = []


def docstrings(text: str) -> Iterator[tuple[int, list[str]]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said:
                yield node.body[0].lineno, said.splitlines()


def document(text: str) -> Iterator[tuple[int, list[str]]]:
    """The lines of a page that are neither code nor headings."""
    lines, fenced = [], False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        lines.append("" if fenced or line.lstrip().startswith(("```", "#")) else line)
    yield 1, lines


def paragraphs(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Each with the number of lines before it."""
    found: list[str] = []
    for number, line in enumerate([*lines, ""]):
        ends = not line.strip() or line.lstrip().startswith("|") or COLUMNS.search(line)
        if found and (ends or ITEM.match(line)):
            yield number - len(found), " ".join(found)
            found = []
        if not ends:
            found.append(ITEM.sub("", line, count=1).strip())


def sentences(path: Path) -> Iterator[Sentence]:
    text = (ROOT / path).read_text()
    if path.suffix == ".md":
        blocks = list(document(text))
    else:
        blocks = list(comments(text, MARKS[path.suffix]))
        blocks += docstrings(text) if path.suffix in (".py", ".pyi") else []
    for begin, lines in blocks:
        for before, paragraph in paragraphs(lines):
            for place, said in enumerate(SPLIT.split(paragraph)):
                yield Sentence(begin + before, said, place == 0 and before == 0 and path.suffix != ".md")
