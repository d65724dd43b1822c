# SPDX-License-Identifier: Apache-2.0
"""Says which C++ files include a folder that is not above their own in the order of lamina/CMakeLists.txt, and which
take a std::hash: ranks compare values, and those of std::hash are each process's own."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
OWN_HASH = re.compile(r"\bstd::hash<")
HASHES = Path("lamina/base/ids.h")  # keys of containers


def folder_order() -> list[str]:
    """The engine's folders, lowest first."""
    text = (ROOT / "lamina" / "CMakeLists.txt").read_text()
    return [
        folder
        for name in ("LAMINA_PLAIN", "LAMINA_TORCHED")
        for folder in re.search(rf"set\({name} ([^)$]+)\)", text).group(1).split()
    ]


def main() -> int:
    order = {folder: height for height, folder in enumerate(folder_order())}
    problems = []
    for path in sorted((ROOT / "lamina").rglob("*")):
        if path.suffix not in (".h", ".cc"):
            continue
        name = path.relative_to(ROOT)
        if len(name.parts) == 2:  # what includes the public headers
            continue
        own = name.parts[1]
        if own not in order:
            problems.append(f"{name}: folder lamina/{own} is not listed in lamina/CMakeLists.txt")
            continue
        text = path.read_text()
        if name != HASHES and OWN_HASH.search(text):
            problems.append(f"{name}: a hash of this process's own; take that of lamina/base/hash.h")
        for included in INCLUDE.findall(text):
            parts = included.split("/")
            if parts[0] != "lamina" or not (ROOT / included).exists():
                problems.append(f'{name}: "{included}" is not a path from the repository root')
            elif order.get(parts[1], len(order)) > order[own]:
                problems.append(f"{name}: lamina/{own} stands below lamina/{parts[1]} and may not include it")
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
