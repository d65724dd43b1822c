# SPDX-License-Identifier: Apache-2.0
"""Any layout on accelerators trains like one process on the host, to rounding."""

import pytest
from launch.case_jobs import of_job, results
from soak import SOAK

# Kind, ranks, and how many cases.
LAUNCHES = [
    ("layouts", 2, 400 if SOAK else 4),
    ("sharded", 2, 100 if SOAK else 4),
    ("sharded", 4, 40 if SOAK else 3),
    ("random", 2, 200 if SOAK else 4),
    ("random", 4, 100 if SOAK else 3),
    ("sliced", 2, 200 if SOAK else 3),
    ("sliced", 4, 100 if SOAK else 2),
]


def found(kind: str, world: int, count: int) -> dict[str, list[str]]:
    return results(f"devices_{kind}{world}", world, "devices/run_layouts.py", kind, str(count))


JOBS = [of_job(f"devices_{kind}{world}", "", (kind, world, count)) for kind, world, count in LAUNCHES]


@pytest.mark.parametrize("launch", JOBS)
def test_trains_like_one_process_on_the_host(launch):
    ended = found(*launch)
    assert ended.pop("launch") == []
    wrong = {case: lines for case, lines in ended.items() if lines}
    assert not wrong
    assert len(ended) == launch[2]
