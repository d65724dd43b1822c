# SPDX-License-Identifier: Apache-2.0
"""Runs random cases; with --sliced before all else those with sliced layers.

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
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1]))

from equivalence import random_cases, sliced_cases
from equivalence.random_cases import RandomCase
from launch.case_report import Report, read
from launch.launcher_harness import command

SLICED = "--sliced"


def results(kind: ModuleType, numbers: list[int], runs: Callable[[str], bool]) -> Iterator[tuple[str, list[str]]]:
    """The name of each case of this world size that runs, and what is wrong with it on this rank."""
    from equivalence import random_comparison, sliced_sides

    check = random_comparison.check if kind is random_cases else sliced_sides.check
    world = int(os.environ["WORLD_SIZE"])
    drawn = map(kind.draw_case, numbers) if numbers else kind.cases(world)
    for case in drawn:
        if case.world == world and runs(case.name):
            try:
                yield case.name, check(case)
            except Exception:
                yield case.name, [traceback.format_exc()]


def run(kind: ModuleType, numbers: list[int]) -> None:
    """On a rank."""
    with Report() as report:
        for name, wrong in results(kind, numbers, report.runs):
            report.add(name, wrong)


def train(kind: ModuleType, number: int) -> None:
    """On a rank: the case alone, to be recorded."""
    from equivalence import random_sides, sliced_sides

    case = kind.draw_case(number)
    if kind is sliced_cases:
        sliced_sides.distributed(case, [])
    else:
        random_sides.distributed(case, deterministic_server="twice" in case.traits)


def launch(kind: ModuleType, numbers: list[int]) -> None:
    for number in numbers:
        case = kind.draw_case(number)
        print(case.describe(), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            words = [command(), "run", "-n", str(case.world), __file__, *words_of(kind), str(number)]
            subprocess.run(words, env=os.environ | {"DIR": folder})
            found = [read(Path(folder), rank).get(case.name, ["it did not end"]) for rank in range(case.world)]
        for rank, wrong in enumerate(found):
            print(f"rank {rank}:", *(wrong or ["equal"]), sep="\n  ", flush=True)
        if any(found):
            subprocess.run(words_of_verify(kind, case))


def words_of(kind: ModuleType) -> list[str]:
    return [SLICED] if kind is sliced_cases else []


def words_of_verify(kind: ModuleType, case: RandomCase) -> list[str]:
    """The command that says where the case goes wrong."""
    against = ["--against", "tp=1"] if kind is sliced_cases else []
    program = [__file__, *words_of(kind), "--train", str(case.number)]
    return [command(), "verify", "-n", str(case.world), "--steps", "20", *against, *program]


def main(words: list[str]) -> None:
    kind = sliced_cases if words[:1] == [SLICED] else random_cases
    words = words[len(words_of(kind)) :]
    if words[:1] == ["--train"]:
        train(kind, int(words[1]))
    elif "RANK" in os.environ:
        run(kind, [int(word) for word in words])
    else:
        launch(kind, [int(word) for word in words])


if __name__ == "__main__":
    main(sys.argv[1:])
