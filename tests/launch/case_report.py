# SPDX-License-Identifier: Apache-2.0
"""What a rank of a job of cases says: a JSON line per case with its name and a list of what is wrong with it there."""

import json
import os
from pathlib import Path


class Report:
    """The file of this rank in the job's folder, $DIR."""

    def __enter__(self):
        self._file = _path(Path(os.environ["DIR"]), os.environ["RANK"]).open("w", buffering=1)
        return self

    def __exit__(self, *_):
        self._file.close()

    def add(self, case: str, wrong: list[str]) -> None:
        print(json.dumps([case, wrong]), file=self._file)


def read(folder: Path, rank: int) -> dict[str, list[str]]:
    path = _path(folder, rank)
    return dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}


def _path(folder: Path, rank: int | str) -> Path:
    return folder / f"results-{rank}"
