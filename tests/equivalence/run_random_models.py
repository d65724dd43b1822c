# SPDX-License-Identifier: Apache-2.0
"""Runs random cases; each rank writes a JSON line per case with what is wrong on it.

    python tests/equivalence/run_random_models.py NUMBER...     prints these cases and what is wrong with them

Started by the launcher it runs the cases of its world size: those numbers, else the sample, or with LAMINA_SOAK all.
"""

import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from equivalence.random_cases import cases, draw_case


def run(numbers: list[int]) -> None:
    """On a rank."""
    from equivalence.random_comparison import check

    world, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    drawn = map(draw_case, numbers) if numbers else cases(world, bool(os.environ.get("LAMINA_SOAK")))
    file = Path(os.environ["DIR"], f"wrong-{rank}").open("w", buffering=1) if "DIR" in os.environ else None
    for case in drawn:
        if case.world != world:
            continue
        wrong = checked(check, case)
        if file:
            print(json.dumps([case.name, wrong]), file=file)
        else:
            print(f"rank {rank}:", *(wrong or ["equal"]), sep="\n  ")


def checked(check, case) -> list[str]:
    try:
        return check(case)
    except Exception:
        return [traceback.format_exc()]


def launch(numbers: list[int]) -> None:
    from launch.launcher_harness import command

    for number in numbers:
        case = draw_case(number)
        print(case.describe(), flush=True)
        os.spawnv(os.P_WAIT, command(), ["lamina", "run", "-n", str(case.world), __file__, str(number)])


if __name__ == "__main__":
    chosen = [int(word) for word in sys.argv[1:]]
    run(chosen) if "RANK" in os.environ else launch(chosen)
