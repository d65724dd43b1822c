# SPDX-License-Identifier: Apache-2.0
"""lamina.dist under each launcher."""

import sys
import uuid
from pathlib import Path

import pytest
from launch.forked_ranks import ForkedRank
from launch.launcher_harness import PRELOAD, require_success
from soak import some

PROGRAM = Path(__file__).with_name("dist_program.py")
SLURM = {"JOB_ID": uuid.uuid4().int % 10**9, "STEP_ID": 0, "STEP_NUM_TASKS": 2, "STEP_NUM_NODES": 1, "NODEID": 0,
         "STEP_TASKS_PER_NODE": "2", "STEP_NODELIST": "127.0.0.1"}  # fmt: skip


def task_of_srun(rank):
    told = SLURM | {"PROCID": rank, "LOCALID": rank}
    return {f"SLURM_{name}": str(value) for name, value in told.items()}


def task_of_mpirun(rank):
    told = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in told.items()} | {"PMIX_NAMESPACE": PMIX}


HOW = ["dist", "groups", "beside"]
PMIX = uuid.uuid4().hex


@pytest.mark.parametrize("how", some(HOW, 1, seed=1))
@pytest.mark.parametrize("task", [task_of_srun, task_of_mpirun])
def test_ranks_that_a_cluster_starts_find_each_other(launcher, task, how):
    for rank in range(2):
        environment = launcher.environment(**task(rank))
        launcher.started.append(ForkedRank([str(PROGRAM), how], environment, launcher.folder, rank))
    require_success(launcher.started)


@pytest.mark.parametrize("how", HOW)
def test_so_do_those_that_are_told_by_torchruns_variables(launcher, how):
    require_success(launcher.start_ranks(2, PROGRAM, how))


@pytest.mark.parametrize("how", some(HOW, 1, seed=5))
def test_so_do_those_of_lamina_run(launcher, how):
    run = launcher.run("run", *PRELOAD, "-n", 2, PROGRAM, how)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("how", some(HOW, 1, seed=0))
def test_so_do_those_of_torchrun(launcher, how):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", PROGRAM, how]
    run = launcher.run(*words, binary=sys.executable)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_waits_for_a_lost_one_gets_a_peer_error(launcher, lost):
    require_success(launcher.start_ranks(2, PROGRAM.with_name("dist_lost.py"), lost))


def test_each_machine_has_a_local_rank_0_and_all_hear_of_one_that_fails(launcher):
    job = ["--nnodes", 2, "-n", 2, "--master-addr", "127.0.0.1", "--master-port", launcher.reserve_port()]
    program = PROGRAM.with_name("dist_machines.py")
    started = [launcher.start("run", *PRELOAD, *job, "--node-rank", node, program) for node in range(2)]
    require_success(started)
