# SPDX-License-Identifier: Apache-2.0
"""Runs every case of this world size; each rank writes a JSON line per case with what is wrong on it."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from equivalence.cases import check
from equivalence.generate import cases


def main() -> None:
    with Path(os.environ["DIR"], f"wrong-{os.environ['RANK']}").open("w", buffering=1) as file:
        for case in cases(int(os.environ["WORLD_SIZE"])):
            print(json.dumps([case.name, check(case)]), file=file)


if __name__ == "__main__":
    main()
