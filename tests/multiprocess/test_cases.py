# SPDX-License-Identifier: Apache-2.0
"""The Python face over several processes. Cases are in cases_*.py; a launch runs those of one subject or more."""

from pathlib import Path

import pytest
from launch.case_jobs import of_job, results
from multiprocess.cases import cases

# By launch: how many ranks, and the subjects whose cases they run, in this order.
LAUNCHES: dict[str, tuple] = {
    "pipeline": (2, "out_of_step", "step_check", "pipeline"),
    "travelling_state": (2, "compiled", "call_kinds", "refusals", "travelling_state"),
    "determinism": (2, "determinism", "zero_bubble"),
    "split": (2, "split"),
    "autocast": (2, "autocast"),
    "checkpointing": (2, "parameters", "checkpointing"),
    "replicas": (2, "optimizers", "replicas"),
    "dist": (2, "dist"),
    "memory": (2, "memory"),
    "replaced": (2, "replaced"),
    "sliced": (2, "sliced"),
    "sliced_state": (2, "sliced_state"),
    "sliced_batches": (
        2,
        "sliced_check",
        "sliced_exchanges",
        "sliced_partial_states",
        "sliced_weights",
        "sliced_gradients",
        "sliced_batches",
    ),
    "sliced_models": (2, "sliced_models"),
    "sliced_proofs": (2, "sliced_proofs"),
    "sliced_pipeline": (4, "sliced_pipeline"),
    "gathered_pipeline": (4, "gathered_pipeline"),
    "sliced_shards": (8, "sliced_shards"),
    "partial_model": (
        2,
        "states",
        "body_writes",
        "attributes",
        "hooks",
        "shared_state",
        "tracing",
        "partial_model",
    ),
    "stored": (2, "stored"),
    "timeline": (2, "job_ends", "timeline"),
    "smp_trainer": (2, "smp_trainer"),
    "trainer_layouts": (2, "trainer_layouts"),
    "trainer_callbacks": (2, "trainer_callbacks"),
    "trainer_memory": (2, "trainer_memory"),
    "trainer_change": (4, "trainer_change"),
    "failures": (3, "stopped_training", "writes", "failures"),
    "trainer_loop": (3, "trainer_loop"),
    "remote": (3, "remote"),
    "trainer_resumed": (2, "trainer_resumed"),
    "rrefs": (2, "rrefs"),
    "groups": (4, "stopped_training", "groups"),
    "backend": (4, "backend"),
    "change": (4, "change", "change_parts"),
    "change_slices": (4, "change_slices"),
    "change_pairs": (2, "change_parts"),
    "precision": (4, "sliced_copies", "reduce_dtype", "precision"),
    "lightning": (4, "lightning"),
    "transformers": (4, "transformers"),
    "peft": (4, "peft"),
    "checkpoints": (4, "checkpoints"),
    "odd_checkpoints": (4, "odd_checkpoints"),
    "smp_checkpoints": (4, "smp_checkpoints"),
    "sharded": (4, "sharded"),
    "replicated_pipelines": (4, "replicated_pipelines"),
}
CASES = [of_job(launch, case, launch, case) for launch, (_, *of) in LAUNCHES.items() for case in cases(*of)]


def found(launch: str) -> dict[str, list[str]]:
    ranks, *subjects = LAUNCHES[launch]
    return results(launch, ranks, "multiprocess/run_cases.py", *subjects)


@pytest.mark.parametrize("launch, case", CASES)
def test_case(launch, case):
    assert case in found(launch), f"it did not end on every rank; the launch: {found(launch)['launch']}"
    assert not found(launch)[case], "\n".join(found(launch)[case])


@pytest.mark.parametrize("launch", [of_job(launch, "", launch) for launch in LAUNCHES])
def test_the_launch_ends_well_and_leaves_nothing_behind(launch):
    assert not found(launch)["launch"]


def test_a_launch_runs_each_subject():
    written = {path.stem.removeprefix("cases_") for path in Path(__file__).parent.glob("cases_*.py")}
    assert written == {subject for _, *subjects in LAUNCHES.values() for subject in subjects}
