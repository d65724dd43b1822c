# SPDX-License-Identifier: Apache-2.0
"""A script's own process groups work before, between and after lamina's joins, by torchrun or with a plain environment.

Usage: with_torch_distributed.py PATH_TO_libjoin_probe.so
"""

import ctypes
import os
import random
import subprocess
import sys


def use_process_group():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return dist


def run_rank(probe):
    import torch  # noqa: F401  (libtorch must be there before the probe)

    join_and_leave = ctypes.CDLL(probe).lamina_join_and_leave
    # One group under torchrun: there the store outlives a group, and torch's next one stumbles over what it left.
    for _ in range(0 if "TORCHELASTIC_RUN_ID" in os.environ else 3):
        use_process_group().destroy_process_group()
        assert join_and_leave() == 0
    assert join_and_leave() == 0
    dist = use_process_group()
    assert join_and_leave() == 0, "with a process group alive"
    dist.barrier()
    dist.destroy_process_group()
    assert join_and_leave() == 0


def main(probe):
    me = [os.path.abspath(__file__), probe, "--rank"]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    port = random.randint(20000, 32000)
    ranks = [
        subprocess.Popen(
            [sys.executable, *me],
            env=dict(env, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
        )
        for rank in range(2)
    ]
    plain = [rank.wait(timeout=200) for rank in ranks]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *me]
    elastic = subprocess.run(torchrun, env=env, timeout=200, check=False).returncode
    print(f"plain environment: {plain}, torchrun: {elastic}")
    sys.exit(0 if plain == [0, 0] and elastic == 0 else 1)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        run_rank(sys.argv[1])
    else:
        main(sys.argv[1])
