# SPDX-License-Identifier: Apache-2.0
"""Trains faulty.py with `verify_steps` and many faults, one after the other, in one launch.

python tests/verify/checked_faults.py [FAULT...]     says what is found of each; without names, of all
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from verify.faults import FAULTS, UNSEEN_IN_JOBS
from verify.run_faults import RANKS, Run, run

STEPS = 3


def check(folder: Path, faults: list[str]) -> None:
    """On a rank: writes what the check says of each fault."""
    from verify import faulty

    from lamina.verification.plain_model import PlainModel

    PlainModel._in_place = spared(PlainModel._in_place)
    layouts = sorted({FAULTS[fault].layout for fault in faults})
    for fault, layout in [*(("none", layout) for layout in layouts), *((each, FAULTS[each].layout) for each in faults)]:
        said = "nothing"
        try:
            faulty.run(fault, layout, verify_steps=STEPS)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        (folder / f"{layout}-{fault}-{os.environ['RANK']}").write_text(said)


def spared(in_place):
    """Has the plain model, in the same process, without the fault."""

    @contextmanager
    def without(self) -> Iterator[None]:
        state = self._tree.root.state[0]
        with in_place(self):
            state.is_here = False
            try:
                yield
            finally:
                state.is_here = True

    return without


def launch(folder: Path, faults: list[str], run: Run) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    run(RANKS, [__file__, "--check", str(folder), *faults], {})


def found(folder: Path, fault: str, layout: str) -> list[str]:
    """Returns what each rank says: the first difference, or the whole error."""
    said = [path.read_text() for path in sorted(folder.glob(f"{layout}-{fault}-*"))]
    return [re.sub(r"(?s).*nothing was updated: (.*?) \[step-differs\].*", r"\1", each) for each in said]


def wrong_with(folder: Path, faults: list[str]) -> list[str]:
    """Lists what is wrong with what is said of each fault."""
    wrong = []
    for fault in faults:
        said = found(folder, fault, FAULTS[fault].layout)
        shown = "nothing" if fault in UNSEEN_IN_JOBS else FAULTS[fault].in_job or FAULTS[fault].shown
        if len(said) != RANKS or not all(shown in each for each in said):
            wrong.append(f"{fault}: not '{shown}': {said}")
    for layout in sorted({FAULTS[fault].layout for fault in faults}):
        said = found(folder, "none", layout)
        if said != ["nothing"] * RANKS:
            wrong.append(f"without a fault, {layout}: {said}")
    return wrong


def main() -> None:
    if sys.argv[1:2] == ["--check"]:
        return check(Path(sys.argv[2]), sys.argv[3:])
    faults = sys.argv[1:] or list(FAULTS)
    with tempfile.TemporaryDirectory() as folder:
        launch(Path(folder), faults, run)
        for fault in faults:
            print(f"{fault}: {found(Path(folder), fault, FAULTS[fault].layout)[0].partition(chr(10))[0]}")
        print(*wrong_with(Path(folder), faults), sep="\n")


if __name__ == "__main__":
    main()
