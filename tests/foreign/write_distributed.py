# SPDX-License-Identifier: Apache-2.0
"""Saves a model and its optimizer by torch.distributed.checkpoint, under torchrun, and whole states beside it.

torchrun --nproc-per-node 2 write_distributed.py fsdp|tp|flat FOLDER
"""

import os
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(nn.Module):
    """Sizes that divide by nothing, a buffer, a frozen part."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 10)
        self.wide, self.narrow = nn.Linear(10, 14), nn.Linear(14, 10, bias=False)
        self.norm, self.odd = nn.LayerNorm(10), nn.Linear(10, 7)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        return self.odd(self.norm(self.narrow(torch.relu(self.wide(self.embedding(x))))))


def groups(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    return [
        {"params": matrices, "lr": 0.01, "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() == 1], "lr": 0.02},
    ]


def main():
    mode, folder = sys.argv[1:]
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model, mesh = Net(), init_device_mesh("cpu", (2,))
    if mode == "tp":
        parallelize_module(model, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    else:
        fully_shard(model.wide, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(groups(model))
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randint(31, (4, 5))).square().mean().backward()
        optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=mode == "flat")
    state, states = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": state, "optim": states, "extra": {"step": 3}}, checkpoint_id=folder)
    whole, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if distributed.get_rank() == 0:
        torch.save({"model": whole, "optim": states}, f"{folder}.new")
        os.rename(f"{folder}.new", f"{folder}.pt")  # all is there: torch's threads may abort a process that ends
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
