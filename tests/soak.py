# SPDX-License-Identifier: Apache-2.0
"""Tests that `make test` leaves to `make soak`. As a program it reads what `ctest -N` lists, and prints a pattern of
the names of those that are left out."""

import itertools
import os
import random
import re
import sys
from collections import defaultdict

SOAK = bool(os.environ.get("LAMINA_SOAK"))
# `make test` runs such parts of the tests of these jobs, files and folders; `make soak`, and pytest by itself, run all.
PARTS = {
    "tests/devices": 0.5,
    "tests/docs/test_pages.py": 0.2,
    "tests/equivalence": 0.1,
    "tests/fault": 0.09,
    "tests/launch": 0.15,
    "tests/multiprocess": 0.2,
    "tests/multiprocess/test_cases.py": 0.07,
    "tests/python/planning/test_planning.py": 0.5,
    "tests/verify": 0.1,
    "trainer_loop": 0.15,
    "pipeline": 0.2,
    "trainer_resumed": 0.15,
    "trainer_callbacks": 0.15,
    "trainer_layouts": 0.15,
    "transformers": 0.07,
}
# Parts of the programs that ctest starts, by the beginnings of their names.
PARTS_OF_PROGRAMS = {"frontend_outliving": 0.3, "frontend_verified": 0.3, "frontend_exits": 0.4}


def left_out(tests):
    """The tests of a list, by their ids, that `make test` leaves out: the same ones each time."""
    groups = defaultdict(list)
    for test in tests:
        file = test.partition("::")[0]
        case, at, last = test.partition("[")[2].removesuffix("]").rpartition("@")
        if at and not case:
            continue  # asks how the job ended
        job = at and last
        places = (job, file, file.rpartition("/")[0])
        if (part := next((PARTS[place] for place in places if place in PARTS), None)) is not None:
            groups[job or file, part].append(test)
    left = set()
    for (name, part), group in groups.items():
        every = sorted(group)
        left |= set(every) - set(random.Random(name).sample(every, max(1, round(part * len(every)))))
    return left


def programs_left_out(names):
    """The names of those that ctest is to leave out for `make test`."""
    left = set()
    for begin, part in PARTS_OF_PROGRAMS.items():
        every = sorted(name for name in names if name.startswith(begin))
        left |= set(every) - set(random.Random(begin).sample(every, round(part * len(every))))
    return left


def some(every, count, seed=0):
    """Every case in a soak; else a few that the seed draws."""
    every = list(every)
    return every if SOAK else random.Random(seed).sample(every, count)


def paired(every, others, seed=0):
    """All pairs in a soak; else as few as have each of both in one, which the seed draws."""
    every, others = list(every), list(others)
    if SOAK:
        return list(itertools.product(every, others))
    random.Random(seed).shuffle(others)
    count = max(len(every), len(others))
    return [(every[number % len(every)], others[number % len(others)]) for number in range(count)]


if __name__ == "__main__":
    listed = re.findall(r"Test +#\d+: (\S+)", sys.stdin.read())
    print(f"^({'|'.join(sorted(programs_left_out(listed)))})$")
