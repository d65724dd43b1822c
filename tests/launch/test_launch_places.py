# SPDX-License-Identifier: Apache-2.0
"""Jobs over several machines, and how a cluster's launcher starts them; the machines are all this one."""

import json
import os
import sys
from pathlib import Path

import pytest

SAY = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $NODE_RANK $GROUP_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"


def step(task, nodes):
    """Variables of srun for one task on each of `nodes` machines."""
    return {
        "SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": nodes, "SLURM_JOB_NODELIST": f"127.0.0.[1-{nodes}]",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": f"127.0.0.[1-{nodes}]", "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_STEP_NUM_TASKS": nodes, "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})", "SLURM_PROCID": task,
        "SLURM_NODEID": task, "SLURM_LOCALID": "0",
    }  # fmt: skip


def text(variables):
    return {name: str(value) for name, value in variables.items()}


@pytest.mark.parametrize("way", ["options", "environment", "torchrun"])
def test_a_launcher_on_each_machine_makes_one_job(launcher, way):
    flags = {
        "options": lambda node: (["-n", 2, "--world_size", 4, "--base_rank", 2 * node, "--master_addr", "127.0.0.2",
                                  "--master_port", 4711], {}),
        "environment": lambda node: ([], {"LOCAL_WORLD_SIZE": 2, "WORLD_SIZE": 4, "NODE_RANK": node,
                                          "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": 4711}),
        "torchrun": lambda node: (["--nproc-per-node", 2, "--nnodes", 2, "--node-rank", node, "--master-addr",
                                   "127.0.0.2", "--master-port", 4711], {}),
    }[way]  # fmt: skip
    for node in range(2):
        words, variables = flags(node)
        result = launcher.run("run", *words, "-c", "sh", "-c", SAY + " > $DIR/$RANK", env=text(variables))
        assert (result.returncode, result.stderr) == (0, "")
    said = [(launcher.folder / str(rank)).read_text().split() for rank in range(4)]
    assert said == [f"{rank} {rank % 2} 4 2 {rank // 2} 2 127.0.0.2 4711".split() for rank in range(4)]


def test_under_srun_the_launcher_fills_in_what_the_job_is(launcher):
    ports = set()
    for node in range(3):
        result = launcher.run("run", "-n", 2, "-c", "sh", "-c", SAY, env=text(step(node, 3)))
        assert result.returncode == 0
        *places, address, port = result.stdout.split()
        assert [*map(int, places)] == [2 * node, 0, 6, 2, node, 3]
        assert address == "127.0.0.1"
        ports.add(port)
    assert len(ports) == 1


def test_several_launchers_on_one_machine_are_refused(launcher):
    two = step(0, 1) | {"SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "2"}
    result = launcher.run("run", "-n", 2, "-c", "true", env=text(two))
    assert result.returncode == 2
    assert "srun --ntasks-per-node=1 lamina run" in result.stderr
    assert result.stderr.endswith("\nmore: lamina explain run-nested\n") and result.stderr.count("\n") == 2


def test_an_allocation_used_in_part_is_pointed_out(launcher):
    variables = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "a,b", "SLURM_PROCID": "0"}
    result = launcher.run("run", "-c", "true", env=variables)
    assert result.returncode == 0
    assert result.stderr.startswith("lamina run: warning: the allocation has 2 machines")


def test_the_machines_of_a_job_share_a_secret_by_file_or_get_one_from_rank_0(launcher):
    (launcher.folder / "dump.py").write_text(
        "import os\nfd = os.environ.get('LAMINA_SECRET_FD')\n"
        "secret = os.read(int(fd), 100).hex() if fd else 'none'\n"
        "open(os.environ['RANK'], 'w').write(secret + ' ' + os.environ['TORCHELASTIC_RUN_ID'])\n"
    )
    file = launcher.folder / "secret"
    file.write_bytes(bytes(range(40)))
    file.chmod(0o600)
    job = ["--nnodes", 2, "-n", 1, "--master_addr", "127.0.0.1", "--master_port", 4711]
    for given, secret in ([], "none"), (["--secret-file", file], bytes(range(32)).hex()):
        for node in range(2):
            assert launcher.run("run", *job, *given, "--node_rank", node, "dump.py").returncode == 0
            assert (launcher.folder / str(node)).read_text() == f"{secret} lamina-127.0.0.1-4711"
    file.chmod(0o644)
    result = launcher.run("run", *job, "--secret-file", file, "--node_rank", 0, "dump.py")
    assert result.returncode == 2 and "chmod 600" in result.stderr


def test_a_distribution_file_sets_count_variables_and_configuration(launcher):
    (launcher.folder / "job.yaml").write_text(
        "smdistributed:\n  modelparallel:\n    enabled: true\n    parameters: {partitions: 2, microbatches: 4}\n"
        "mpi: {enabled: true, processes_per_host: 2, custom_mpi_options: -x COLOUR=red --mca a b}\n"
    )
    say = "printenv WORLD_SIZE COLOUR SM_HP_MP_PARAMETERS"
    result = launcher.run("run", "--config", "job.yaml", "-c", "sh", "-c", say)
    count, colour, parameters = result.stdout.split()
    assert (count, colour, json.loads(parameters)) == ("2", "red", {"partitions": 2, "microbatches": 4})
    assert "no effect without MPI: --mca a b" in result.stderr
    result = launcher.run("run", "-n", 1, "--config", "job.yaml", "-x", "COLOUR=blue", "-c", "sh", "-c", say)
    assert result.stdout.split()[:2] == ["1", "blue"]


def test_a_file_with_keys_of_the_configuration_counts_before_the_environment(launcher):
    (launcher.folder / "job.yaml").write_text("partitions: 2\nmicrobatches: 4\n")
    say = "printenv SM_HP_MP_PARAMETERS; printenv LAMINA_CONFIG || echo none"
    left = {"SM_HP_MP_PARAMETERS": '{"ddp": true}', "LAMINA_CONFIG": '{"bf16": true}'}
    result = launcher.run("run", "-n", 1, "--config", "job.yaml", "-c", "sh", "-c", say, env=left)
    keys, own = result.stdout.splitlines()
    assert json.loads(keys) == {"partitions": 2, "microbatches": 4} and own == "none"
    for name in left:
        assert f"{name} of the environment has no effect" in result.stderr


COMPAT = Path(__file__).resolve().parents[2] / "python/compat"


@pytest.mark.parametrize("module", ["composer", "composer.cli", "composer.cli.launcher"])
def test_composer_is_the_same_command(launcher, module):
    path = f"{COMPAT}:{os.environ.get('PYTHONPATH', '')}"
    result = launcher.run("-m", module, "--np", "2", "-vc", "sh", "-c", "echo $RANK of $WORLD_SIZE",
                          binary=sys.executable, env={"PYTHONPATH": path})  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "0 of 2\n")


def test_composer_refuses_a_command_where_others_may_write(launcher):
    place = launcher.folder / "open"
    place.mkdir()
    (place / "lamina").write_text("#!/bin/sh\necho others\n")
    (place / "lamina").chmod(0o755)
    env = {"PYTHONPATH": f"{COMPAT}:{os.environ.get('PYTHONPATH', '')}", "LAMINA_COMMAND": str(place / "lamina")}
    words = ("-m", "composer", "--np", "2", "train.py")
    place.chmod(0o777)
    result = launcher.run(*words, binary=sys.executable, env=env)
    assert result.returncode == 1 and result.stdout == ""
    assert "composer: LAMINA_COMMAND names code that others may have put there: " in result.stderr
    place.chmod(0o755)
    result = launcher.run(*words, binary=sys.executable, env=env)
    assert (result.returncode, result.stdout) == (0, "others\n"), result.stderr
