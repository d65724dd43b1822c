# SPDX-License-Identifier: Apache-2.0
"""Part of checkpoints.py: loads the checkpoints that another number of ranks has saved, in turns, and prints as JSON
the seconds and the MiB on top of each time.

    lamina run -n 2 benchmarks/load_checkpoints.py FOLDER
"""

import json
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoints import Ours, Torchs, with_peak
from measure import arguments

import lamina


def main() -> None:
    options = arguments(__doc__, "folder")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lamina.init(ddp=True, sharded_data_parallel_degree=dist.get_world_size(), sdp_gradient_clipping=1e9)
    systems = [Ours(options.quick), Torchs(options.quick)]
    taken = {system.name: [] for system in systems}
    for system in systems:
        system.step()
    for number in range(options.pick(1, 3, 7)):
        for system in systems if number % 2 else systems[::-1]:
            taken[system.name].append(with_peak(partial(system.load, Path(options.folder) / system.name)))
    lamina.shutdown()
    if dist.get_rank() == 0:
        print(json.dumps(taken))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
