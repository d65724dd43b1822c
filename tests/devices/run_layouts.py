# SPDX-License-Identifier: Apache-2.0
"""run_layouts.py KIND COUNT: cases of tests/equivalence. Each rank computes its part on an emulated accelerator of its
own, and all is compared with what one process computes on the host."""

import itertools
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "build/emulated"))

import emulated  # noqa: F401 -- makes the devices known to torch
from equivalence import cases, generate, random_cases, random_comparison, sharded_cases, sliced_cases, sliced_sides
from launch.case_report import Report

CHECKS = {
    "layouts": cases.check,
    "sharded": sharded_cases.check,
    "random": random_comparison.check,
    "sliced": sliced_sides.check,
}
DRAWN = {"random": random_cases, "sliced": sliced_cases}  # from numbers


def drawn(kind: str, world: int, count: int) -> list:
    """As many of these cases, in float64, the same on all ranks."""
    if kind == "sharded":
        return sharded_cases.cases(world, count)
    if kind in DRAWN:
        every = DRAWN[kind]
        drawn_of_all = map(every.draw_case, random.Random(world).sample(range(every.EVERY), every.EVERY))
        return list(itertools.islice((case for case in drawn_of_all if case.world == world), count))
    exact = [case for case in generate.cases(world) if case.dtype == "float64"]
    return random.Random(world).sample(exact, min(count, len(exact)))


def main(kind: str, count: str) -> None:
    with Report() as report:
        for case in drawn(kind, int(os.environ["WORLD_SIZE"]), int(count)):
            if report.runs(case.name):
                report.add(case.name, CHECKS[kind](case))


if __name__ == "__main__":
    main(*sys.argv[1:])
