# SPDX-License-Identifier: Apache-2.0
"""Runs every case of this world size; each rank reports what is wrong on it."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from equivalence.cases import check
from equivalence.generate import cases
from launch.case_report import Report


def main() -> None:
    with Report() as report:
        for case in cases(int(os.environ["WORLD_SIZE"])):
            if report.runs(case.name):
                report.add(case.name, check(case))


if __name__ == "__main__":
    main()
