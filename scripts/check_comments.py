# SPDX-License-Identifier: Apache-2.0
"""Names the sentences of comments, docstrings and documents that have to be read twice: a clause stands where a noun or
a verb should ("What a rank holds.", "Those that wait."), a second relative clause hangs on the first one, or there are
more than 35 words. Names the lines of pages, too, that are longer than 130 characters.

Words behind code on its line ("// of each rank") are no sentences, so they may begin with anything.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from prose import MARKS, Sentence, document, sentences
from tree import ROOT, tracked

# A comment's first words have nothing before them that they could mean.
CLAUSE = re.compile(r"(What|Whether|Whoever|Who|Whom|Whose|Of|The same|That|Those|All (that|who|which|of))\b")
FREE = re.compile(
    r"((That|Those) (of|that|which|who|whom|whose|in|with|where|by|from|for)|All (that|who|which))\b"
    r"|Where\b[^,]*[^,?]$"
)
RELATIVE = re.compile(r"\b(which|who|whom|whose)\b")
WORD = re.compile(r"[A-Za-z0-9][\w.'/:-]*")
QUOTED = re.compile(r"`[^`]*`|\]\([^)]*\)")
LINK = re.compile(r"\s*(?:- )?\(?\[.*\]\(\S+\)\S*")
MOST_WORDS = 35
MOST_CHARACTERS = 130


def problem(sentence: Sentence) -> str | None:
    said = sentence.text
    if FREE.match(said) or (sentence.first and CLAUSE.match(said)):
        return "begin with a noun or a verb"
    if " = " in said or " == " in said:  # code
        return None
    words = len(WORD.findall(QUOTED.sub(" X ", said)))
    if words > MOST_WORDS:
        return f"{words} words in a sentence, {MOST_WORDS} are the most"
    if "?" not in said and len(RELATIVE.findall(said)) > 1:
        return "two relative clauses in a sentence"
    return None


def long_lines(text: str) -> Iterator[tuple[int, int]]:
    """The number and the length of lines that are too long: but for tables, code, and links that have a line alone."""
    for number, lines in document(text):
        for place, line in enumerate(lines, number):
            if len(line) > MOST_CHARACTERS and not line.startswith("|") and not LINK.fullmatch(line):
                yield place, len(line)


def main() -> int:
    problems = [
        f"{name}:{sentence.line}: {found}: {sentence.text}"
        for name in tracked(*MARKS, ".md")
        if name not in (Path("scripts/check_comments.py"), Path("CHANGELOG.md"))
        for sentence in sentences(name)
        if (found := problem(sentence))
    ]
    problems += [
        f"{name}:{line}: {length} characters in a line, {MOST_CHARACTERS} are the most"
        for name in tracked(".md")
        for line, length in long_lines((ROOT / name).read_text())
    ]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
