# SPDX-License-Identifier: Apache-2.0
"""Records faulty.py with many faults in one launch, and once without any in each layout.

python tests/verify/run_faults.py [FAULT...]     says what is found of each; without names, of all
"""

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch.launcher_harness import command
from verify.faults import FAULTS, LAYOUTS

RANKS = 2
Run = Callable[[int, list[str], dict[str, str]], None]


def record(folder: Path, faults: list[str]) -> None:
    """On a rank."""
    from verify import faulty

    collapsed = "LAMINA_VERIFY_COLLAPSED" in os.environ
    layouts = sorted({FAULTS[fault].layout for fault in faults})
    runs = [("none", layout) for layout in layouts]
    runs += [(fault, FAULTS[fault].layout) for fault in faults if FAULTS[fault].of_itself or not collapsed]
    for fault, layout in runs:
        place = folder / layout / fault / ("plain" if collapsed else "layout")
        place.mkdir(parents=True, exist_ok=True)
        os.environ |= {"LAMINA_VERIFY_FOLDER": str(place), "LAMINA_VERIFY_STEPS": "100"}
        try:
            faulty.run(fault, layout)
        except Exception:
            (place / f"failed-{os.environ['RANK']}").write_text(traceback.format_exc())


def launch(folder: Path, faults: list[str], run: Run) -> None:
    """Records the faults in their layouts, and what they are compared with."""
    words = [__file__, "--record", str(folder)]
    run(RANKS, [*words, *faults], {})
    by_copies: dict[int, list[str]] = {}
    for fault in faults:
        copies = RANKS // LAYOUTS[FAULTS[fault].layout].get("partitions", 1)
        by_copies.setdefault(copies, []).append(fault)
    for copies, chosen in by_copies.items():
        run(copies, [*words, *chosen], {"LAMINA_VERIFY_COLLAPSED": "1"})


def run(ranks: int, words: list[str], variables: dict[str, str]) -> None:
    """Runs a script on so many ranks."""
    words = [command(), "run", "-n", str(ranks), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def found(folder: Path, fault: str) -> tuple[int, str]:
    """The exit code and the report of the comparison of a fault."""
    kept = folder / FAULTS[fault].layout
    return compared(kept / fault / "layout", kept / (fault if FAULTS[fault].of_itself else "none") / "plain")


def compared(first: Path, second: Path) -> tuple[int, str]:
    failed = [path.read_text() for side in (first, second) for path in side.glob("failed-*")]
    if failed:
        return -1, "\n".join(failed)
    done = subprocess.run([command(), "verify", "--compare", first, second], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def wrong_with(folder: Path, faults: Iterable[str]) -> list[str]:
    """Lists what is wrong with the report of each fault."""
    wrong = []
    for fault in faults:
        code, text = found(folder, fault)
        first = text.partition("\n")[0]
        if code != 3 or FAULTS[fault].shown not in first:
            wrong.append(f"{fault}: not '{FAULTS[fault].shown}', exit code {code}: {text if code == -1 else first}")
    for layout in sorted({FAULTS[fault].layout for fault in faults}):
        code, text = compared(*(folder / layout / "none" / side for side in ("layout", "plain")))
        if code != 0:
            wrong.append(f"without a fault, {layout}: exit code {code}: {text}")
    return wrong


def main() -> None:
    if sys.argv[1:2] == ["--record"]:
        return record(Path(sys.argv[2]), sys.argv[3:])
    faults = sys.argv[1:] or list(FAULTS)
    with tempfile.TemporaryDirectory() as folder:
        launch(Path(folder), faults, run)
        for fault in faults:
            print(f"{fault}: {found(Path(folder), fault)[1].partition(chr(10))[0]}")
        print(*wrong_with(Path(folder), faults), sep="\n")


if __name__ == "__main__":
    main()
