# SPDX-License-Identifier: Apache-2.0
"""A rank that runs random trainings by the Trainer; or those of the numbers given, which it prints.

lamina run -n RANKS tests/equivalence/run_trainer.py NUMBER...
"""

import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from equivalence import trainer_cases
from launch.case_report import Report

import lamina


def wrong_with(case: trainer_cases.TrainerCase) -> list[str]:
    try:
        return trainer_cases.check(case)
    except Exception:
        return [traceback.format_exc()]
    finally:
        lamina.shutdown()


def main() -> None:
    world = int(os.environ["WORLD_SIZE"])
    if "DIR" not in os.environ:
        for number in map(int, sys.argv[1:]):
            case = trainer_cases.TrainerCase(number, world)
            print(case.name, wrong_with(case))
        return
    with Report() as report:
        for case in trainer_cases.cases(world, int(sys.argv[1])):
            if report.runs(case.name):
                report.add(case.name, wrong_with(case))
                report.wait_for_others()


if __name__ == "__main__":
    main()
