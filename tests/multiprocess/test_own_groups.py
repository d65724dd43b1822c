# SPDX-License-Identifier: Apache-2.0
"""torch.distributed next to lamina, under each launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD, require_success
from soak import some

PROGRAM = Path(__file__).with_name("own_groups.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
WHEN = ["before", "after", "never"]


@pytest.mark.parametrize("when", WHEN)
def test_replicas_train_and_end_well_whoever_makes_the_groups(when, launcher):
    require_success(launcher.start_ranks(2, PROGRAM, when))


@pytest.mark.parametrize("when", some(WHEN, 1, seed=2))
def test_they_do_so_under_lamina_run(when, launcher):
    run = launcher.run("run", *PRELOAD, "-n", 2, PROGRAM, when)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("when", some(WHEN, 1))
def test_they_do_so_under_torchrun(when):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    words = [*TORCHRUN, PROGRAM, when]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


SPAWNED = """
import os
import socket
import torch
import torch.distributed
import lamina

def work(rank, size, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    lamina.init(ddp=True)
    assert (lamina.rank(), lamina.size()) == (rank, size)
    torch.manual_seed(0)
    model = lamina.DistributedModel(torch.nn.Linear(4, 1, bias=False))
    model(torch.full((1, 4), float(rank))).sum().backward()
    assert model.module.weight.grad.eq(0.5).all()
    lamina.shutdown()
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (2, port), 2)
"""


def test_functions_that_torch_spawns_are_the_ranks_of_its_group(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    words = [sys.executable, program]
    run = subprocess.run(words, env=own | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
