# SPDX-License-Identifier: Apache-2.0
"""Runs every case of this world size; the first rank prints one JSON line per case with what is wrong on any rank."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist
from equivalence.cases import check
from equivalence.generate import cases


def main() -> None:
    # c10d, not lamina, carries the verdicts: they are about lamina.
    dist.init_process_group("gloo")
    for case in cases(dist.get_world_size()):
        wrong = check(case)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, wrong)
        if int(os.environ["RANK"]) == 0:
            named = [f"rank {rank}: {line}" for rank, lines in enumerate(everyone) for line in lines]
            print(json.dumps({"case": case.name, "wrong": named}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
