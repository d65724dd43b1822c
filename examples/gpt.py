# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803 -- the shape suffixes are capitals
"""A small GPT over bytes: an ordinary module that knows nothing of lamina.

Shapes in names: B sequences, L bytes of context, D width, H heads, E = D / H, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int, context: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        frequency = 1000.0 ** -torch.linspace(0, 1, width // heads // 2)
        angle = torch.outer(torch.arange(context), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        B, L, D = x_BLD.shape
        q, k, v = (t.view(B, L, self.heads, -1).transpose(1, 2) for t in self.qkv(x_BLD).chunk(3, dim=-1))
        y_BHLE = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y_BHLE.transpose(1, 2).reshape(B, L, D))


class Block(nn.Module):
    """Attention, then a perceptron, each on the normalised sum of all before it."""

    def __init__(self, width: int, heads: int, context: int):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, context)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        x_BLD = x_BLD + self.attention(self.norm_1(x_BLD))
        return x_BLD + self.mlp(self.norm_2(x_BLD))


class GPT(nn.Module):
    """x_BL, bytes as int64, -> logits_BLV of the next byte; with the next bytes y_BL -> the mean loss in nats."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int, context: int):
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._initialise)
        nn.init.normal_(self.embedding.weight, std=0.02)  # small, because it is the head too: first guesses are even
        for block in self.blocks:  # each begins as the identity, which lets the learning rate be high from the start
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp[-1].weight)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x_BL: torch.Tensor, y_BL: torch.Tensor | None = None) -> torch.Tensor:
        h_BLD = self.embedding(x_BL)
        for block in self.blocks:
            h_BLD = block(h_BLD)
        logits_BLV = self.head(self.norm(h_BLD))
        return logits_BLV if y_BL is None else F.cross_entropy(logits_BLV.flatten(0, 1), y_BL.flatten())
