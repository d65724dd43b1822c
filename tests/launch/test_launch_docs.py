# SPDX-License-Identifier: Apache-2.0
"""Every command of docs/launching.md does what it says."""

import os
import pathlib
import re
import shlex
import sys

import pytest
from launch.launcher_harness import ROOT, command, free_port

PAGE = (ROOT / "docs/launching.md").read_text()
COMMANDS = [line.split(" #")[0].strip() for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
            for line in block.splitlines()]  # fmt: skip
MACHINES = pathlib.Path(__file__).with_name("machines.py")

# Ranks of ours meet each other; those of srun and mpirun ask lamina who they are; torchrun holds the port itself.
TRAIN = f"""
import os, runpy
if "LAMINA_LAUNCHER" in os.environ:
    runpy.run_path({str(MACHINES)!r}, run_name="__main__")
elif "TORCHELASTIC_RUN_ID" in os.environ:
    open(os.environ["DIR"] + "/met", "w")
else:
    import lamina
    lamina.init(partitions=2)
    open(os.environ["DIR"] + "/met", "w").write(str(lamina.allgather(lamina.rank(), lamina.WORLD)))
    lamina.shutdown()
"""

# Stand-ins for what Slurm and Open MPI tell the tasks that they start, here on this machine: srun TASKS NODES, mpirun
# TASKS NODES.
STARTER = """#!{python}
import os, subprocess, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
tasks, nodes, own = 2, 1, dict(os.environ)
while words[0].startswith("-"):
    word = words.pop(0)
    if word == "--nodes=2" or word == "--map-by" and words.pop(0) == "ppr:1:node":
        nodes = 2
    elif word == "-n":
        tasks = int(words.pop(0))
    elif word == "-x":
        own.update([words.pop(0).split("=")])
each = tasks // nodes
started = []
for task in range(tasks):
    node, local = divmod(task, each)
    if name == "srun":
        hosts = "127.0.0.1" if nodes == 1 else "127.0.0.[1-2]"
        env = {{"JOB_ID": os.getppid(), "JOB_NUM_NODES": nodes, "JOB_NODELIST": hosts, "STEP_ID": 0,
               "STEP_NODELIST": hosts, "STEP_NUM_NODES": nodes, "STEP_NUM_TASKS": tasks,
               "STEP_TASKS_PER_NODE": f"{{each}}(x{{nodes}})", "PROCID": task, "NODEID": node, "LOCALID": local}}
        env = {{"SLURM_" + key: str(value) for key, value in env.items()}}
    else:
        env = {{"RANK": task, "SIZE": tasks, "LOCAL_RANK": local, "LOCAL_SIZE": each}}
        env = {{"OMPI_COMM_WORLD_" + key: str(value) for key, value in env.items()}}
        env["PMIX_NAMESPACE"] = str(os.getppid())
    started.append(subprocess.Popen(words, env=own | env))
sys.exit(max(abs(task.wait()) for task in started))
"""


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def place(launcher):
    """A folder in which the commands of the page are found, and the files that they name."""
    tools = launcher.folder / "tools"
    (launcher.folder / "package").mkdir()
    tools.mkdir()
    (launcher.folder / "train.py").write_text(TRAIN)
    (launcher.folder / "package/train.py").write_text(TRAIN)
    (launcher.folder / "job.yaml").write_text(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
    executable(launcher.folder / "program", f'#!/bin/sh\nexec {sys.executable} -S {MACHINES} "$@"\n')
    executable(tools / "lamina", f'#!/bin/sh\nexec {command()} "$@"\n')
    executable(tools / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    executable(tools / "composer", f'#!/bin/sh\nexec {sys.executable} -m composer "$@"\n')
    for name in ("srun", "mpirun"):
        executable(tools / name, STARTER.format(python=sys.executable))
    path = f"{tools}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    python = f"{ROOT / 'python/compat'}:{os.environ.get('PYTHONPATH', '')}"
    return {"PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1", "LAMINA_COMMAND": command()}


def jobs():
    """The commands, those together that one job is started by."""
    together = []
    for line in COMMANDS:
        if re.search("--node.rank 1|^lamina run --secret", line):
            together[-1].append(line)
        else:
            together.append([line])
    return together


@pytest.mark.parametrize("lines", jobs(), ids=lambda lines: shlex.join(lines)[:60].replace("/", " "))
def test_it_works(launcher, place, lines):
    setup = [line for line in lines if "lamina" not in line and len(lines) > 1]
    for line in setup:
        assert launcher.run("-c", line, binary="/bin/sh", env=place).returncode == 0
    port = str(free_port())
    here = [line.replace("10.0.0.1", "127.0.0.1").replace("29500", port) for line in lines]
    started = [launcher.start("-c", line, binary="/bin/sh", env=place) for line in here if line not in setup]
    for job in started:
        _, errors = job.communicate(timeout=100)
        assert job.returncode == 0, errors
    assert (launcher.folder / "met").exists(), "rank 0 met the others"
