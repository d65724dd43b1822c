# SPDX-License-Identifier: Apache-2.0
"""Trains on two ranks until a callback raises: trainer_raises.py EVENT RANK LAYOUT [FOLDER]. With "state_dict" in the
place of an event its callback asks for the model's values, on that rank alone, after the first batch. With a FOLDER,
for temporary files, loaders have a worker."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from equivalence.trainer_cases import Model, data_of
from torch.utils.data import DataLoader

import lamina
from lamina.trainer import Callback, Trainer

EVENT, RANK, LAYOUT = sys.argv[1], int(sys.argv[2]), sys.argv[3]
WORKERS = len(sys.argv) - 4
if WORKERS:
    tempfile.tempdir = sys.argv[4]
LAYOUTS = {
    "copies": {},
    "shards": {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
    "partitions": {"partitions": 2},
}


class Raises(Callback):
    def run_event(self, event, state, logger):
        if lamina.dist.get_global_rank() != RANK:
            return
        if event.value == EVENT:
            raise ArithmeticError(f"planted in {EVENT}")
        if EVENT == "state_dict" and event.value == "batch_end":
            state.model.state_dict()


data = data_of(12, 1)


def loader():
    return DataLoader(data, 2, sampler=lamina.dist.get_sampler(data), num_workers=WORKERS)


trainer = Trainer(
    model=Model("mean"),
    train_dataloader=loader(),
    eval_dataloader=loader(),
    max_duration="2ep",
    callbacks=Raises(),
    grad_accum=2,
    dist_timeout=20 if EVENT == "state_dict" else 300,
    lamina_config=LAYOUTS[LAYOUT],
)
trainer.fit()
