# SPDX-License-Identifier: Apache-2.0
"""The errors in the sources: of each place that raises one its type, and its words with `…` for what is filled in."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = (
    "Error|ConfigError|UsageError|DesyncError|PeerError|TimeoutError|FormatError|CancelledError|RemoteError|StartError"
    "|MissingEnvironmentError"
)
GAP = "…"


@dataclass(frozen=True)
class Raised:
    kind: str
    words: str  # "" where they are made elsewhere
    where: str


def raised() -> list[Raised]:
    python = [path for folder in ("python/lamina", "python/compat") for path in (ROOT / folder).rglob("*.py")]
    engine = [path for folder in ("lamina", "apps", "python/bindings") for path in (ROOT / folder).rglob("*.*")]
    found = [each for path in sorted(python) for each in in_python(path)]
    return found + [each for path in sorted(engine) if path.suffix in (".cc", ".h") for each in in_cpp(path)]


def literals() -> str:
    """All that the sources say in strings, each on a line of its own."""
    lines = []
    for folder in ("python/lamina", "python/compat", "lamina", "apps", "python/bindings"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix == ".py":
                strings = [joined(node) for node in ast.walk(ast.parse(path.read_text()))]
                lines += [words for words in strings if words]
            elif path.suffix in (".cc", ".h"):
                lines += [words_of(text) for text in statements(without_comments(path.read_text()))]
    return "\n".join(lines)


# Python.


def in_python(path: Path) -> Iterator[Raised]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if re.fullmatch(KINDS, name):
                words = joined(node.args[0]) if node.args else ""
                yield Raised(name, tidy(words), f"{path.relative_to(ROOT)}:{node.lineno}")


def joined(node: ast.AST) -> str:
    """A string as it is written, with what is filled in as a gap; "" where nothing is written."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [value.value if isinstance(value, ast.Constant) else GAP for value in node.values]
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return joined(node.left) + joined(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return joined(node.left)
    return ""


# C++.


def in_cpp(path: Path) -> Iterator[Raised]:
    text = without_comments(path.read_text())
    for match in re.finditer(rf"(?:throw |make_exception_ptr\()\s*(?:\w+::)*({KINDS})\(", text):
        words = words_of(text[match.end() : closing(text, match.end())])
        yield Raised(match[1], tidy(words), f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}")


def without_comments(text: str) -> str:
    return re.sub(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*', lambda match: match[1] or "", text)


def statements(text: str) -> list[str]:
    return re.split(r";\s*\n", text)


def words_of(text: str) -> str:
    """The literals of an expression; those with nothing between them are one."""
    words, end = "", 0
    for match in re.finditer(r'"((?:[^"\\\n]|\\.)*)"', text):
        between = text[end : match.start()].strip() if end else text[: match.start()].strip("( \n")
        words += (GAP if between else "") + match[1].replace('\\"', '"').replace("\\n", " ")
        end = match.end()
    return words


def closing(text: str, start: int) -> int:
    depth, inside = 1, False
    for at in range(start, len(text)):
        if text[at] == '"' and text[at - 1] != "\\":
            inside = not inside
        elif not inside:
            depth += (text[at] == "(") - (text[at] == ")")
            if depth == 0:
                return at
    return len(text)


def tidy(words: str) -> str:
    return re.sub(rf"(?:{GAP}\s*)+{GAP}", GAP, words).strip()
