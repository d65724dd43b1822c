# SPDX-License-Identifier: Apache-2.0
"""The jobs whose checkpoints are stored beside this file, small ones of two ranks.

A sample is written once, by the version that its folder names, and never again: later versions have to load it.

    lamina run -n 2 tests/multiprocess/stored_jobs.py FOLDER
"""

import pathlib
import sys

import torch
from torch import nn

import lamina
import smdistributed.modelparallel.torch as smp

SHARDED = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_gradient_clipping": 1e9,
}
LAYOUTS = {
    "pipeline": {"partitions": 2},
    "replicas": {"ddp": True},
    "divided": {"ddp": True, "shard_optimizer_state": True},
    "sharded": SHARDED,
}
# By sample its layout, its precision, how it is saved.
SAMPLES = {
    "pipeline": ("pipeline", {}, lamina.save_checkpoint),
    "divided_bf16": ("divided", {"bf16": True}, lamina.save_checkpoint),
    "sharded_fp16": ("sharded", {"fp16": True}, lamina.save_checkpoint),
    "smp_pipeline": ("pipeline", {}, smp.save_checkpoint),
    "smp_sharded": ("sharded", {}, smp.save_checkpoint),
}


class Net(nn.Module):
    """Tied weights, odd sizes, a buffer, a frozen parameter, dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.Sequential(
            nn.Linear(6, 7), nn.LayerNorm(7), nn.Dropout(0.1), nn.Linear(7, 6), nn.LayerNorm(6, bias=False)
        )
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[0].bias.requires_grad_(False)
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x)))


@lamina.step
def train(model, x):
    loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.flatten())
    model.backward(loss)
    return loss


class Job:
    """A training over two ranks, with an optimizer of two groups and a parameter that is not the model's."""

    def __init__(self, layout: str, precision: dict):
        lamina.init(timeout_s=30, microbatches=2, **LAYOUTS[layout], **precision)
        self.model = lamina.DistributedModel(Net())
        self.beside = nn.Parameter(torch.ones(3))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        groups = [{"params": trained[::2], "lr": 3e-3}, {"params": trained[1::2]}]
        groups.append({"params": [self.beside], "weight_decay": 0.0})
        self.optimizer = lamina.DistributedOptimizer(
            torch.optim.AdamW(groups, lr=1e-2), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 256.0}
        )

    def train(self) -> None:
        self.optimizer.zero_grad()
        train(self.model, torch.arange(16).view(4, 4) % 11)
        self.beside.grad = torch.full_like(self.beside, 0.5)
        self.optimizer.step()

    def state(self) -> dict:
        """Returns all that a checkpoint has of it, alike on all ranks."""
        return {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}


def write(folder: pathlib.Path) -> None:
    for name, (layout, precision, save) in SAMPLES.items():
        job = Job(layout, precision)
        for _ in range(3):
            job.train()
        save(folder / name, "three", model=job.model, optimizer=job.optimizer, user_content={"steps": 3})
        state = job.state() | {"drawn": torch.rand(4)}
        if lamina.rank() == 0:
            torch.save(state, folder / name / "state.pt")
        lamina.barrier()
        lamina.shutdown()


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
