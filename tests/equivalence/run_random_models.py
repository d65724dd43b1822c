# SPDX-License-Identifier: Apache-2.0
"""Runs random cases.

    python tests/equivalence/run_random_models.py NUMBER...     prints these cases, what is wrong with them, and where
    lamina verify -n RANKS tests/equivalence/run_random_models.py --train NUMBER     says where one goes wrong

Started by the launcher it runs the cases of its world size: those numbers, else the sample, or all with LAMINA_SOAK;
each rank reports what is wrong on it.
"""

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from equivalence.random_cases import RandomCase, cases, draw_case
from launch.case_report import Report, read
from launch.launcher_harness import command


def results(numbers: list[int], runs: Callable[[str], bool]) -> Iterator[tuple[str, list[str]]]:
    """The name of each case of this world size that runs, and what is wrong with it on this rank."""
    from equivalence.random_comparison import check

    world = int(os.environ["WORLD_SIZE"])
    drawn = map(draw_case, numbers) if numbers else cases(world)
    for case in drawn:
        if case.world == world and runs(case.name):
            try:
                yield case.name, check(case)
            except Exception:
                yield case.name, [traceback.format_exc()]


def run(numbers: list[int]) -> None:
    """On a rank."""
    with Report() as report:
        for name, wrong in results(numbers, report.runs):
            report.add(name, wrong)


def train(number: int) -> None:
    """On a rank: the case alone, to be recorded."""
    from equivalence.random_sides import distributed

    case = draw_case(number)
    distributed(case, deterministic_server="twice" in case.traits)


def launch(numbers: list[int]) -> None:
    for number in numbers:
        case = draw_case(number)
        print(case.describe(), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            words = [command(), "run", "-n", str(case.world), __file__, str(number)]
            subprocess.run(words, env=os.environ | {"DIR": folder})
            found = [read(Path(folder), rank).get(case.name, ["it did not end"]) for rank in range(case.world)]
        for rank, wrong in enumerate(found):
            print(f"rank {rank}:", *(wrong or ["equal"]), sep="\n  ", flush=True)
        if any(found):
            subprocess.run(words_of_verify(case))


def words_of_verify(case: RandomCase) -> list[str]:
    """The command that says where the case goes wrong."""
    return [command(), "verify", "-n", str(case.world), "--steps", "20", __file__, "--train", str(case.number)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(int(sys.argv[2]))
        sys.exit()
    chosen = [int(word) for word in sys.argv[1:]]
    run(chosen) if "RANK" in os.environ else launch(chosen)
