# SPDX-License-Identifier: Apache-2.0
"""Reports of a rank of a job of cases: a JSON line per case with its name and a list of what is wrong with it there."""

import json
import os
import time
from pathlib import Path

PATIENCE_S = 60.0  # with a rank that has ended, or hangs


CHOSEN = "chosen"  # the file in the job's folder with the names of the cases to run; without it, all run


class Report:
    """The file of this rank in the job's folder, $DIR."""

    def __enter__(self):
        self._folder = Path(os.environ["DIR"])
        chosen = self._folder / CHOSEN
        self._chosen = set(json.loads(chosen.read_text())) if chosen.exists() else None
        self._file = _path(self._folder, os.environ["RANK"]).open("w", buffering=1)
        self._others = [rank for rank in range(int(os.environ["WORLD_SIZE"])) if rank != int(os.environ["RANK"])]
        self._cases = 0
        return self

    def __exit__(self, *_):
        self._file.close()

    def runs(self, case: str) -> bool:
        """True for a case that the job is to run: every rank gives the same answer."""
        return self._chosen is None or case in self._chosen

    def add(self, case: str, wrong: list[str]) -> None:
        print(json.dumps([case, wrong]), file=self._file)
        self._cases += 1

    def wait_for_others(self) -> None:
        """Until they have said as much: the next case does not meet what the last one left on a slower rank."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(self._cases_of(rank) >= self._cases for rank in self._others):
            if time.monotonic() > deadline:
                self._others = []
            time.sleep(0.001)

    def _cases_of(self, rank: int) -> int:
        path = _path(self._folder, rank)
        return path.read_text().count("\n") if path.exists() else 0


def read(folder: Path, rank: int) -> dict[str, list[str]]:
    path = _path(folder, rank)
    return dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}


def _path(folder: Path, rank: int | str) -> Path:
    return folder / f"results-{rank}"
