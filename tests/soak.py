# SPDX-License-Identifier: Apache-2.0
"""Tests that `make test` leaves to `make soak`."""

import itertools
import os
import random
from collections import defaultdict

SOAK = bool(os.environ.get("LAMINA_SOAK"))
# `make test` runs such parts of the tests of these folders, files and jobs; `make soak`, and pytest by itself, run all.
PARTS = {
    "tests/docs/test_pages.py": 0.3,
    "tests/equivalence": 0.4,
    "tests/fault": 0.4,
    "tests/launch": 0.5,
    "tests/multiprocess/test_dist_launchers.py": 0.5,
    "tests/multiprocess/test_examples.py": 0.5,
    "tests/multiprocess/test_own_groups.py": 0.5,
    "tests/multiprocess/test_sharded_memory.py": 0.5,
    "tests/trainer": 0.5,
    "tests/verify": 0.2,
    "multiprocess.cases_checkpoints": 0.3,
    "multiprocess.cases_gathered_pipeline": 0.3,
    "multiprocess.cases_lightning": 0.3,
    "multiprocess.cases_loop": 0.5,
    "multiprocess.cases_odd_checkpoints": 0.5,
    "multiprocess.cases_pair": 0.5,
    "multiprocess.cases_partial_model": 0.3,
    "multiprocess.cases_precision": 0.3,
    "multiprocess.cases_replaced": 0.4,
    "multiprocess.cases_replicas": 0.4,
    "multiprocess.cases_resumed": 0.4,
    "multiprocess.cases_sharded": 0.3,
    "multiprocess.cases_sliced_batches": 0.3,
    "multiprocess.cases_sliced_models": 0.3,
    "multiprocess.cases_sliced_pipeline": 0.3,
    "multiprocess.cases_sliced_shards": 0.3,
    "multiprocess.cases_smp_checkpoints": 0.3,
    "multiprocess.cases_trainer_extras": 0.4,
    "multiprocess.cases_trainer_layouts": 0.4,
    "multiprocess.cases_trainer_memory": 0.5,
    "multiprocess.cases_transformers": 0.3,
    "multiprocess.cases_travelling": 0.4,
}


def left_out(tests):
    """The tests of a list, by their ids, that `make test` leaves out: the same ones each time."""
    groups = defaultdict(list)
    for test in tests:
        file = test.partition("::")[0]
        case, at, job = test.partition("[")[2].removesuffix("]").rpartition("@")
        if at and not case:
            continue  # asks how the job ended
        if (name := next((name for name in (job, file, file.rpartition("/")[0]) if name in PARTS), None)) is not None:
            groups[name if name == job else file].append((PARTS[name], test))
    left = set()
    for name, group in groups.items():
        every = sorted(test for _, test in group)
        left |= set(every) - set(random.Random(name).sample(every, max(1, round(group[0][0] * len(every)))))
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
