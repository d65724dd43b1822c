# SPDX-License-Identifier: Apache-2.0
"""The Python face over several processes. The cases are in cases_*.py; each file is one launch."""

import pytest
from launch.case_jobs import of_job, results
from multiprocess.cases import cases

LAUNCHES = {
    "multiprocess.cases_pair": 2,
    "multiprocess.cases_travel_pair": 2,
    "multiprocess.cases_order": 2,
    "multiprocess.cases_autocast": 2,
    "multiprocess.cases_checkpointing": 2,
    "multiprocess.cases_replicas": 2,
    "multiprocess.cases_dist": 2,
    "multiprocess.cases_memory": 2,
    "multiprocess.cases_replaced": 2,
    "multiprocess.cases_sliced": 2,
    "multiprocess.cases_sliced_state": 2,
    "multiprocess.cases_sliced_batches": 2,
    "multiprocess.cases_sliced_models": 2,
    "multiprocess.cases_sliced_proofs": 2,
    "multiprocess.cases_sliced_pipeline": 4,
    "multiprocess.cases_gathered_pipeline": 4,
    "multiprocess.cases_sliced_shards": 8,
    "multiprocess.cases_partial_model": 2,
    "multiprocess.cases_stored": 2,
    "multiprocess.cases_timeline": 2,
    "multiprocess.cases_trainer": 2,
    "multiprocess.cases_trainer_layouts": 2,
    "multiprocess.cases_trainer_extras": 2,
    "multiprocess.cases_trainer_memory": 2,
    "multiprocess.cases_failures": 3,
    "multiprocess.cases_loop": 3,
    "multiprocess.cases_remote": 3,
    "multiprocess.cases_resumed": 2,
    "multiprocess.cases_rrefs": 2,
    "multiprocess.cases_four": 4,
    "multiprocess.cases_backend": 4,
    "multiprocess.cases_precision": 4,
    "multiprocess.cases_lightning": 4,
    "multiprocess.cases_transformers": 4,
    "multiprocess.cases_peft": 4,
    "multiprocess.cases_checkpoints": 4,
    "multiprocess.cases_odd_checkpoints": 4,
    "multiprocess.cases_smp_checkpoints": 4,
    "multiprocess.cases_sharded": 4,
    "multiprocess.cases_replicated_pipelines": 4,
}


def found(module: str) -> dict[str, list[str]]:
    return results(module, LAUNCHES[module], "multiprocess/run_cases.py", module)


@pytest.mark.parametrize("module, case", [of_job(m, case, m, case) for m in LAUNCHES for case in cases(m)])
def test_case(module, case):
    assert case in found(module), f"it did not end on every rank; the launch: {found(module)['launch']}"
    assert not found(module)[case], "\n".join(found(module)[case])


@pytest.mark.parametrize("module", [of_job(module, "", module) for module in LAUNCHES])
def test_the_launch_ends_well_and_leaves_nothing_behind(module):
    assert not found(module)["launch"]
