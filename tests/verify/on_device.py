# SPDX-License-Identifier: Apache-2.0
"""A script that trains on emulated accelerators.

lamina verify -n 2 tests/verify/on_device.py KIND [fault]

KIND is pipeline, replicas or slices. With a fault one layer computes with its rank's number.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "build/emulated"))

import emulated  # noqa: F401 -- makes the devices known to torch
import torch
from torch import nn

import lamina

KIND, FAULT = sys.argv[1], sys.argv[2:] == ["fault"]
LAYOUTS = {
    "pipeline": {"partitions": 2},
    "replicas": {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1},
    "slices": {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True, "prove_slices": False},
}


class Odd(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + FAULT * lamina.rank())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), Odd(16, 8), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(self.up(x).relu()))


def main():
    lamina.init(LAYOUTS[KIND] | {"microbatches": 2, "seed": 5, "timeout_s": 60})
    torch.manual_seed(0)
    net = nn.Sequential(*[Block() for _ in range(4)])
    if KIND == "pipeline":
        for at, block in enumerate(net):
            lamina.set_partition(block, at // 2)
    if KIND == "slices":
        lamina.set_tensor_parallelism(net, plan={"*.up": "colwise", "*.down": "rowwise"})
    model = lamina.DistributedModel(net)
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @lamina.step
    def train(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    own = lamina.dp_rank() if KIND == "replicas" else 0
    data = torch.Generator().manual_seed(own)
    for _ in range(4):
        optimizer.zero_grad()
        train(torch.randn(8, 8, generator=data).to(lamina.device()))
        optimizer.step()
    assert next(model.parameters()).device.type == "emulated"


main()
