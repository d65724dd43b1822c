# SPDX-License-Identifier: Apache-2.0
"""Names what is wrong with the notes of the tree. A note is a block of a comment or docstring that begins with its name
in brackets, and is referred to by that name elsewhere. It has to stand once, and to be where a reference says.

A line that begins with a reference is told from a note by what follows: a sentence. A note that begins a block may go
on with any word."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tree import ROOT, tracked

SUFFIXES = {".h", ".cc", ".py", ".pyi", ".sh", ".cmake", ".txt", ".md"}
BREAK = r"\s+(?:(?://|#)\s*)?"  # a line's end within a comment, too
NOTE = re.compile(rf"\[Note:{BREAK}((?:[^\]\s]|{BREAK})+)\](?:{BREAK}in{BREAK}`?([\w./]+\w))?")
MARK = r"(?:/{2,}!?|/\*+|\*|#+|[-*>]|[rRbBfFuU]*(?:\"{3}|'{3})|\d+\.)"
BEGINS = re.compile(rf"[ \t]*{MARK}?[ \t]*")
COMMENT = re.compile(rf"[ \t]*{MARK}")
SAYS = re.compile(r"\s+(?:(?://|#)\s*)?[\w*`\"]")
DEFINES = re.compile(r"\s+(?:(?://|#)\s*)?[A-Z0-9*`\"]")


def notes(text: str) -> Iterator[tuple[int, str, bool, str | None]]:
    """The mentions of notes: the line, the note's name, if the note stands here, and the file that a reference
    gives."""
    for found in NOTE.finditer(text):
        *above, before = text[: found.start()].rsplit("\n", 2)[-2:]
        is_first = not above or BEGINS.fullmatch(above[0]) or (before.strip() and not COMMENT.match(above[0]))
        goes_on = SAYS.match(text, found.end()) if is_first else DEFINES.match(text, found.end())
        defines = bool(BEGINS.fullmatch(before) and goes_on and not found[2])
        name = re.sub(BREAK, " ", found[1])
        yield text.count("\n", 0, found.start()) + 1, name, defines, found[2]


def main() -> int:
    stands: dict[str, list[str]] = {}
    asked: list[tuple[str, str, str | None]] = []
    for path in tracked(*SUFFIXES):
        if path == Path("scripts/check_notes.py"):
            continue
        for number, name, defines, file in notes((ROOT / path).read_text()):
            if defines:
                stands.setdefault(name, []).append(f"{path}:{number}")
            else:
                asked.append((f"{path}:{number}", name, file))
    problems = [f"[Note: {name}] stands at {' and '.join(at)}" for name, at in stands.items() if len(at) > 1]
    for at, name, file in asked:
        if name not in stands:
            problems.append(f"{at}: no [Note: {name}] stands anywhere")
        elif file and not any(f"/{there}".rpartition(":")[0].endswith(f"/{file}") for there in stands[name]):
            problems.append(f"{at}: [Note: {name}] stands at {' and '.join(stands[name])}")
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
