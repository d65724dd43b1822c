# SPDX-License-Identifier: Apache-2.0
"""A model whose layers are cut over two ranks: `sliced.py` right, `sliced.py FAULT` with a fault in a slice."""

import sys

import torch
from torch import nn

import lamina


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), Mixer(), Mixer(), nn.Linear(8, 1))
        self.words = lamina.nn.DistributedTransformerLMHead(1, 2, 4, 8, 12, 11, 6)

    def forward(self, x):
        for place in range(4):
            x = self[place](x)
        words = torch.arange(6).view(2, 3)
        loss, scores = self.words((words, None, None, None, words))
        assert scores.shape == ((2, 3, 11) if lamina.tp_size() == 1 else (3, 2, 11))
        return x, loss


lamina.init(tensor_parallel_degree=2, ddp=True, prescaled_batch=True)
torch.manual_seed(0)
model = Model()
lamina.set_tensor_parallelism(model, plan={"*.up": "colwise", "*.down": "rowwise"})
model = lamina.distribute(model)
optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
if sys.argv[1:] and lamina.tp_rank() == 1:
    model.module[2].act.approximate = "tanh"
    model.module[2].act.register_forward_hook(lambda module, given, found: 1.01 * found)


@lamina.step
def train(x):
    found, loss = model(x)
    loss = loss + found.square().mean()
    model.backward(loss)
    return loss


for _ in range(3):
    train(torch.randn(6, 4))
    optimizer.step()
    optimizer.zero_grad()
