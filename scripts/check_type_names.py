# SPDX-License-Identifier: Apache-2.0
"""Names the types of C++ whose name stands for three things or more. A reader who finds a word knows what it means.

Types and aliases count that stand in a namespace: those that a class holds are read with its name. A name that is
declared in one file and defined in another has one home in each folder.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

from tree import ROOT, tracked

DEFINED = re.compile(
    r"^(?:template\s*<.*>\s*)?(?:class|struct|enum(?: class)?|using)\s+(?:\[\[\w+\]\]\s*)?(\w+)"
    r"\s*(?:final\s*)?(?:=|:(?!:)|\{)"
)
MOST = 2


def homes(sources: list[Path]) -> dict[str, set[str]]:
    """By name: the folders that define a type of that name, and a line of each."""
    found: dict[str, dict[Path, str]] = defaultdict(dict)
    for source in sources:
        for number, line in enumerate((ROOT / source).read_text().splitlines(), 1):
            if match := DEFINED.match(line):
                found[match[1]].setdefault(source.parent, f"{source}:{number}")
    return {name: set(places.values()) for name, places in found.items()}


def main() -> int:
    """Prints each name with its homes. 1 where one has too many."""
    sources = [each for below in ("lamina", "apps", "python/bindings") for each in tracked(".h", ".cc", below=below)]
    many = {name: places for name, places in homes(sources).items() if len(places) > MOST}
    for name, places in sorted(many.items()):
        print(f"{name} names {len(places)} things: {', '.join(sorted(places))}")
    return bool(many)


if __name__ == "__main__":
    sys.exit(main())
