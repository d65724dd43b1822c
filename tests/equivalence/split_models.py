# SPDX-License-Identifier: Apache-2.0
"""Models that `lamina.split_graph` cuts, with what they are called with for a microbatch of two samples."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Convolutions(nn.Module):
    """With BatchNorm, and operations in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(x))
        y += x
        return self.head(F.adaptive_avg_pool2d(self.relu(y), 1).flatten(1))


class Transformer(nn.Module):
    """With tied embeddings and a mask that all blocks read."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 16)
        self.register_buffer("mask", torch.triu(torch.full((7, 7), float("-inf")), 1))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return {"logits": self.head(x)}


class Skips(nn.Module):
    """With values that are read far behind, a shared parameter, a layer that is called twice, and a region without
    gradients."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x, factor=1.0):
        a = torch.tanh(self.layers[0](x) * self.scale)
        b = torch.tanh(self.layers[1](a))
        c = torch.tanh(self.layers[2](b) + a)
        with torch.no_grad():
            norm = c.norm(dim=1, keepdim=True)
        left, right = (self.layers[3](c) * self.scale).split(3, 1)
        d = self.layers[0](torch.cat([right, left], 1)) + b * factor
        return self.layers[4](d) / norm, a


class Random(nn.Module):
    """A graph of operations that a seed draws."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("offset", torch.randn(6))

    def forward(self, x):
        draw = random.Random(self.seed)
        values = [x]
        for _ in range(draw.randint(5, 25)):
            one, other = draw.choice(values), draw.choice(values)
            kind = draw.randrange(8)
            if kind < 3:
                values.append(torch.tanh(draw.choice(self.layers)(one)))
            elif kind == 3:
                values.append(one + other * self.offset)
            elif kind == 4:
                left, right = one.split(3, 1)
                values += [torch.cat([right, left], 1), torch.cat([left * 2, left], 1)]
            elif kind == 5:
                made = one * other
                values.append(made.clone().relu_() + made)
            elif kind == 6:
                made = one + other
                made.view(-1)[::2].mul_(0.5)
                values.append(made)
            else:
                values.append(self.norm(one))
        return self.layers[0](values[-1]), [values[len(values) // 2].sin(), 3]


def models() -> dict[str, tuple[type[nn.Module], tuple[Any, ...]]]:
    torch.manual_seed(5)
    return {
        "convolutions": (Convolutions, (torch.randn(2, 3, 6, 6, dtype=torch.float64),)),
        "transformer": (Transformer, (torch.randint(0, 11, (2, 7)),)),
        "skips": (Skips, (torch.randn(2, 6, dtype=torch.float64),)),
    }
