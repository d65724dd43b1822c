# SPDX-License-Identifier: Apache-2.0
"""Runs cases of this world size; each rank reports what is wrong on it.

run_cases.py layouts
run_cases.py sharded COUNT
run_cases.py machines COUNT RANKS_EACH
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from equivalence import cases, generate, sharded_cases
from launch.case_report import Report
from pretended_machines import pretend_machines

KINDS = {
    "layouts": (generate.cases, cases.check),
    "sharded": (sharded_cases.cases, sharded_cases.check),
    "machines": (sharded_cases.cases_on_machines, sharded_cases.check),
}


def main(kind: str, count: str | None = None, ranks_each: str | None = None) -> None:
    if ranks_each is not None:
        pretend_machines(int(ranks_each))
    drawn, check = KINDS[kind]
    with Report() as report:
        for case in drawn(int(os.environ["WORLD_SIZE"]), *([] if count is None else [int(count)])):
            if report.runs(case.name):
                report.add(case.name, check(case))


if __name__ == "__main__":
    main(*sys.argv[1:])
