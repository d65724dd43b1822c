# SPDX-License-Identifier: Apache-2.0
"""A folder in which the commands of a page are found, and the scripts that they start."""

import os
import pathlib
import sys

from launch.launcher_harness import ROOT, command

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

# A stand-in for srun and mpirun, which tells the tasks that it starts what Slurm and Open MPI would.
STARTER = """#!{python}
import os, subprocess, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
own = dict(os.environ)
nodes = int(own.get("SLURM_JOB_NUM_NODES", 1))
tasks = nodes * int(own["SLURM_NTASKS_PER_NODE"]) if "SLURM_NTASKS_PER_NODE" in own else 2
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


def command_place(folder: pathlib.Path) -> dict[str, str]:
    """Makes it in a folder; returns the variables with which its commands are found."""
    tools = folder / "tools"
    (folder / "package").mkdir()
    tools.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "package/train.py").write_text(TRAIN)
    executable(folder / "program", f'#!/bin/sh\nexec {sys.executable} -S {MACHINES} "$@"\n')
    executable(tools / "lamina", f'#!/bin/sh\nexec {command()} "$@"\n')
    executable(tools / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    executable(tools / "composer", f'#!/bin/sh\nexec {sys.executable} -m composer "$@"\n')
    for name in ("srun", "mpirun"):
        executable(tools / name, STARTER.format(python=sys.executable))
    path = f"{tools}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    python = f"{ROOT / 'python/compat'}:{os.environ.get('PYTHONPATH', '')}"
    return {"PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1", "LAMINA_COMMAND": command()}
