# SPDX-License-Identifier: Apache-2.0
"""The Python face on emulated accelerators. Cases are in cases_*.py; a launch runs those of one subject or more."""

import re
from pathlib import Path

import pytest
from launch.case_jobs import of_job, results
from soak import some

SEEDS = some(range(100), 1)  # of delays

# By launch: how many ranks, variables of the environment (NAME=VALUE), and the subjects whose cases they run.
LAUNCHES: dict[str, tuple] = {
    "one_rank": (1, "choices", "trainer", "waits", "batches", "integrations"),
    "delays": (1, "EMULATED_DELAY_US=2000", "saves", "timeline"),
    "offloading": (1, "EMULATED_DELAY_US=200", "offloading"),
    "slow": (1, "EMULATED_DELAY_US=6000", "time"),
    "small_memory": (1, "EMULATED_MEMORY=8000000", "small_memory"),
    "no_room": (2, "EMULATED_MEMORY=8000000", "no_room"),
    "random": (1, "random"),  # whose last case says that no other device was touched
    "two_ranks": (2, "places", "batches", "compiled", "integrations", "trainer_ranks", "memory"),
    "late_kernels": (2, "EMULATED_DELAY_US=1000", "sharded_memory"),
    "four_ranks": (4, "random_of_ranks", "threads_of_ranks"),
} | {f"copies_{seed}": (2, "EMULATED_DELAY_US=500", f"EMULATED_SEED={seed}", "copies") for seed in SEEDS}


def subjects(launch: str) -> list[str]:
    return [word for word in LAUNCHES[launch][1:] if "=" not in word]


def cases(launch: str) -> list[str]:
    """The names of its cases, read without an import: that would give the tests of this process an accelerator."""
    texts = [(Path(__file__).parent / f"cases_{subject}.py").read_text() for subject in subjects(launch)]
    return re.findall(r"^def case_(\w+)", "\n".join(texts), re.MULTILINE)


def found(launch: str) -> dict[str, list[str]]:
    ranks, *words = LAUNCHES[launch]
    return results(f"devices_{launch}", ranks, "devices/run_cases.py", *words)


CASES = [of_job(f"devices_{launch}", case, launch, case) for launch in LAUNCHES for case in cases(launch)]


@pytest.mark.parametrize("launch, case", CASES)
def test_case(launch, case):
    assert case in found(launch), f"it did not end on every rank; the launch: {found(launch)['launch']}"
    assert not found(launch)[case], "\n".join(found(launch)[case])


@pytest.mark.parametrize("launch", [of_job(f"devices_{launch}", "", launch) for launch in LAUNCHES])
def test_the_launch_ends_well_and_leaves_nothing_behind(launch):
    assert not found(launch)["launch"]


def test_a_launch_runs_each_subject():
    written = {path.stem.removeprefix("cases_") for path in Path(__file__).parent.glob("cases_*.py")}
    assert written == {subject for launch in LAUNCHES for subject in subjects(launch)}
