# SPDX-License-Identifier: Apache-2.0
"""Scripts and manifests of docs/clusters.md start a job whose ranks meet, with what each system sets."""

import importlib.util
import re
import shlex
import sys
import tempfile

import pytest
import yaml
from launch.command_place import command_place
from launch.launcher_harness import ROOT
from soak import SOAK

PAGE = (ROOT / "docs/clusters.md").read_text()
SHELL, PYTHON, MANIFESTS = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("sh", "python", "yaml"))
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
OBJECTS = {each.get("kind", "sky"): each for text in MANIFESTS for each in yaml.safe_load_all(text)}
PROGRAMS = {re.match(r"# (\w+\.py)\n", text)[1]: text for text in PYTHON}


@pytest.fixture
def place(launcher):
    return command_place(launcher.folder)


def require_met(launcher, started):
    for job in started:
        output, errors = job.communicate(timeout=100)
        assert job.returncode == 0, output + errors
    return (launcher.folder / "met").read_text().split()


def test_the_batch_script_starts_all_ranks(launcher, place):
    (script,) = (text for text in SHELL if text.startswith("#!"))
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.MULTILINE))
    assert script.count("#SBATCH") == len(options)
    # As sbatch sets them for the script from its options.
    told = {"JOB_NUM_NODES": "nodes", "NTASKS_PER_NODE": "ntasks-per-node", "CPUS_PER_TASK": "cpus-per-task"}
    slurm = {f"SLURM_{name}": options[option] for name, option in told.items()}
    grace = int(re.search(r"--grace-period (\d+)", script)[1])
    assert grace < int(options["signal"].split("@")[1])
    job = launcher.start("-c", script, binary="/bin/bash", env=place | slurm)
    ranks = int(options["nodes"]) * int(re.search(r"lamina run -n (\d+)", script)[1])
    assert len(require_met(launcher, [job])) == ranks - 1


def pods(job, name, subdomain):
    """The command of a Job's pods, and the environment of each; its first pod has that name."""
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    names = {each["name"]: each for each in container["env"]}
    assert names["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
    assert names["MASTER_ADDR"]["value"] == f"{name}-0.{subdomain}"
    volumes = {each["name"]: each for each in pod["volumes"]}
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == "/dev/shm" and volumes[mount["name"]]["emptyDir"]["medium"] == "Memory"
    assert pod["restartPolicy"] == "Never"
    assert set(names) == {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} and int(names["MASTER_PORT"]["value"]) > 1024
    return container["command"] + container["args"], job["completions"]


def of_the_job():
    service, job = OBJECTS["Service"], OBJECTS["Job"]
    name, headless = job["metadata"]["name"], service["spec"]
    assert headless["clusterIP"] == "None" and headless["publishNotReadyAddresses"] is True
    assert headless["selector"] == {"job-name": name}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    return pods(job["spec"], name, service["metadata"]["name"])


def of_the_job_set():
    whole = OBJECTS["JobSet"]
    name = whole["metadata"]["name"]  # of its service, too
    (replicated,) = whole["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1 and whole["spec"]["failurePolicy"]["maxRestarts"] > 0
    job = replicated["template"]["spec"]
    assert job["backoffLimit"] == 0
    return pods(job, f"{name}-{replicated['name']}-0", name)


@pytest.mark.parametrize("manifest", [of_the_job, of_the_job_set])
def test_the_pods_of_a_manifest_meet(launcher, place, manifest):
    command, count = manifest()
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launcher.reserve_port())}
    started = [
        launcher.start(*command[1:], binary=f"/bin/{command[0]}", env=place | told | {"NODE_RANK": str(index)})
        for index in range(count)
    ]
    ranks = count * int(re.search(r"lamina run --nnodes 2 -n (\d+)", command[-1])[1])
    assert len(require_met(launcher, started)) == ranks - 1


@pytest.mark.skipif(not SOAK and importlib.util.find_spec("ray") is None, reason="pip install ray")
def test_the_tasks_of_ray_meet(launcher, place):
    (command,) = (text for text in SHELL if text.startswith("python"))
    name = shlex.split(command)[1]
    recipe = PROGRAMS[name]
    machine = {"ray.init()": "ray.init(num_cpus=4)", "29500": str(launcher.reserve_port())}
    for told, here in machine.items():
        recipe = recipe.replace(told, here)
    (launcher.folder / name).write_text(recipe)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # names of sockets are in it, and Ray's token
        env = place | {"RAY_TMPDIR": short, "HOME": short}
        job = launcher.start(*shlex.split(command)[1:], binary=launcher.folder / "tools/python", env=env)
        assert len(require_met(launcher, [job])) == 3


def machines(launcher, place, command, of_each):
    """One `sh -c` for each machine, with what each is told."""
    return [launcher.start("-c", command, binary="/bin/sh", env=place | told) for told in of_each]


@pytest.mark.parametrize("command", ["the manifest's", "exec lamina run train.py"])
def test_the_pods_of_a_pytorchjob_meet(launcher, place, command):
    spec = OBJECTS["PyTorchJob"]["spec"]
    kinds = spec["pytorchReplicaSpecs"]
    (master,) = kinds["Master"]["template"]["spec"]["containers"]
    assert master["name"] == "pytorch" and master["command"] == ["sh", "-c"] and kinds["Worker"] == kinds["Master"]
    count = sum(each["replicas"] for each in kinds.values())
    # As the training operator sets them.
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launcher.reserve_port())}
    told |= {"PET_NNODES": str(count), "PET_NPROC_PER_NODE": spec["nprocPerNode"], "WORLD_SIZE": str(count)}
    each = [told | {"PET_NODE_RANK": str(index), "RANK": str(index)} for index in range(count)]
    started = machines(launcher, place, command if command.startswith("exec") else master["args"][0], each)
    assert len(require_met(launcher, started)) == count * int(spec["nprocPerNode"]) - 1


def test_the_machines_of_a_sky_task_meet(launcher, place):
    task = OBJECTS["sky"]
    command = task["run"].replace("29500", str(launcher.reserve_port()))
    count = task["num_nodes"]
    told = {"SKYPILOT_NODE_IPS": "127.0.0.1\n" * count, "SKYPILOT_NUM_NODES": str(count)}
    started = machines(launcher, place, command, [told | {"SKYPILOT_NODE_RANK": str(rank)} for rank in range(count)])
    ranks = count * int(re.search(r"lamina run .* -n (\d+)", command)[1])
    assert len(require_met(launcher, started)) == ranks - 1


@pytest.mark.skipif(not SOAK and importlib.util.find_spec("hydra") is None, reason="pip install hydra-core")
def test_the_program_of_hydra_composes_on_every_rank(launcher):
    (command,) = (text for text in SHELL if "on_hydra.py" in text)
    words = shlex.split(command)[1:]
    (launcher.folder / "on_hydra.py").write_text(PROGRAMS["on_hydra.py"])
    run = launcher.run(*words, env={"LAMINA_PYTHON": sys.executable})
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("2 ranks, rate 0.1") == 1
    assert sorted(each.name for each in (launcher.folder / "outputs").iterdir()) == ["0", "1"]
