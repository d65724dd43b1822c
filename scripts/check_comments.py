# SPDX-License-Identifier: Apache-2.0
"""Names the comments and docstrings that begin with a clause ("What a rank holds.") in the place of a noun or a verb
("The rows that a rank holds.", "Returns what ..."): a reader has to resolve the clause before he learns its subject.

Words behind code on its line ("// of each rank") are no sentences, so they may begin with anything.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLAUSE = re.compile(r"(What|Whether|Whoever|Who|Whom|Whose|Of|The same)\b")
MARKS = {".h": "//", ".cc": "//", ".py": "#", ".pyi": "#", ".sh": "#", ".cmake": "#", ".txt": "#"}


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    names = [Path(name) for name in listed.stdout.splitlines()]
    return [name for name in names if name.suffix in MARKS]


def comments(text: str, mark: str) -> Iterator[tuple[int, str]]:
    """The first line of each block of comments, with its number."""
    before = False
    for number, line in enumerate(text.splitlines(), 1):
        beginning, found, said = line.strip().partition(mark)
        alone = bool(found) and not beginning
        if alone and not before:
            yield number, said.strip()
        before = alone and not said.strip().startswith("SPDX")  # a sentence may follow the licence


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said:
                yield node.body[0].lineno, said.splitlines()[0]


def main() -> int:
    problems = []
    for name in tracked():
        path = ROOT / name
        if not path.exists():
            continue
        text = path.read_text()
        found = list(comments(text, MARKS[name.suffix]))
        if name.suffix in (".py", ".pyi"):
            found += docstrings(text)
        problems += [
            f"{name}:{number}: begin with a noun or a verb: {said}" for number, said in found if CLAUSE.match(said)
        ]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
