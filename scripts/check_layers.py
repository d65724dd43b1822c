# SPDX-License-Identifier: Apache-2.0
"""Names the C++ files that include a folder which is not above their own in the order of lamina/CMakeLists.txt. Also
units (a header with its source) of one folder that include each other in a circle. Files that take a std::hash are
named, too. Ranks compare values, and those of std::hash are each process's own."""

import re
import sys
from pathlib import Path

from circles import circles

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<(lamina/[^>]+)>)', re.MULTILINE)
OWN_HASH = re.compile(r"\bstd\s*::\s*hash\s*[<;]")
HASHES = Path("lamina/base/ids.h")  # keys of containers


def folder_order() -> list[str]:
    """The engine's folders, lowest first."""
    text = (ROOT / "lamina" / "CMakeLists.txt").read_text()
    return [
        folder
        for name in ("LAMINA_PLAIN", "LAMINA_TORCHED")
        for folder in re.search(rf"set\({name} ([^)$]+)\)", text).group(1).split()
    ]


def engine_files() -> dict[Path, str]:
    """The text of each C++ file in a folder of the engine; what includes the public headers is in none."""
    files = sorted(path for path in (ROOT / "lamina").rglob("*") if path.suffix in (".h", ".cc"))
    names = [path.relative_to(ROOT) for path in files]
    return {name: (ROOT / name).read_text() for name in names if len(name.parts) > 2}


def includes(text: str) -> list[str]:
    return [quoted or angled for quoted, angled in INCLUDE.findall(text)]


def layer_problems(files: dict[Path, str]) -> list[str]:
    order = {folder: height for height, folder in enumerate(folder_order())}
    problems = []
    for name, text in files.items():
        own = name.parts[1]
        if own not in order:
            problems.append(f"{name}: folder lamina/{own} is not listed in lamina/CMakeLists.txt")
            continue
        if name != HASHES and OWN_HASH.search(text):
            problems.append(f"{name}: a hash of this process's own; take that of lamina/base/hash.h")
        for included in includes(text):
            parts = included.split("/")
            if parts[0] != "lamina" or not (ROOT / included).exists():
                problems.append(f'{name}: "{included}" is not a path from the repository root')
            elif order.get(parts[1], len(order)) > order[own]:
                problems.append(f"{name}: lamina/{own} stands below lamina/{parts[1]} and may not include it")
    return problems


def unit_circles(files: dict[Path, str]) -> set[tuple[str, ...]]:
    """The units of each circle within one folder, sorted."""
    uses: dict[str, set[str]] = {}
    for name, text in files.items():
        unit = str(name.with_suffix(""))
        inside = {included for included in includes(text) if included.split("/")[1:2] == [name.parts[1]]}
        uses.setdefault(unit, set()).update(str(Path(included).with_suffix("")) for included in inside)
    return circles(uses)


def main() -> int:
    files = engine_files()
    problems = layer_problems(files)
    problems += [f"{', '.join(circle)}: include each other in a circle" for circle in sorted(unit_circles(files))]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
