# SPDX-License-Identifier: Apache-2.0
"""The coded errors of the sources: of each place that raises one its code, its type and where it is."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ("python/lamina", "python/compat")
ENGINE = ("lamina", "apps", "python/bindings")
SAYINGS = ROOT / "lamina/faces/sayings.h"


@dataclass(frozen=True)
class Raised:
    code: str
    kind: str
    where: str


def raised() -> list[Raised]:
    python = sorted(path for folder in PYTHON for path in (ROOT / folder).rglob("*.py"))
    engine = sorted(path for folder in ENGINE for path in (ROOT / folder).rglob("*.*") if path.suffix in (".cc", ".h"))
    found = [each for path in python for each in in_python(path)] + [each for path in engine for each in in_cpp(path)]
    return found + list(in_sayings("\n".join(path.read_text() for path in engine)))


def in_python(path: Path) -> Iterator[Raised]:
    """The calls of an error's class with `code="..."`, and of `require_same`, which raises one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        codes = [
            each.value.value for each in node.keywords if each.arg == "code" and isinstance(each.value, ast.Constant)
        ]
        if codes and (name.endswith("Error") or name == "require_same"):
            kind = "UsageError" if name == "require_same" else name
            yield Raised(codes[0], kind, f"{path.relative_to(ROOT)}:{node.lineno}")


def in_cpp(path: Path) -> Iterator[Raised]:
    """The constructions of an error with `Code{"..."}`: the error's is the last one that begins before it."""
    text = path.read_text()
    for match in re.finditer(r'\bCode\{"([^"]+)"\}', text):
        kind = re.findall(r"\b(\w*Error)\(", text[: match.start()])[-1]
        yield Raised(match[1], kind, f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}")


def in_sayings(sources: str) -> Iterator[Raised]:
    """The errors that both faces raise: they are UsageErrors, unless the sources ask for another type."""
    kinds = {name: kind for kind, name in re.findall(r'refusal<base::(\w+)>\("([^"]+)"', sources)}
    for match in re.finditer(r'^    \{"([^"]+)",(?:[^{}]|\{\})*\{"([^"]+)"\}\}', SAYINGS.read_text(), re.MULTILINE):
        yield Raised(match[2], kinds.get(match[1], "UsageError"), f"{SAYINGS.relative_to(ROOT)}: {match[1]}")
