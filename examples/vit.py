# SPDX-License-Identifier: Apache-2.0
"""Trains a vision transformer to tell drawn shapes apart, in a pipeline or in copies of one.

    lamina run -n 2 examples/vit.py      two partitions
    lamina run -n 4 examples/vit.py      two copies of them

All images are new ones, which copies share out.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import lamina

SIZE, PATCH, WIDTH = 24, 6, 48
SHAPES = ("disc", "ring", "square", "cross")


class ViT(nn.Module):
    """Patches of an image as words of a transformer, the mean of which tells what it shows."""

    def __init__(self, layers=4, heads=4):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, WIDTH))
        layer = {"dim_feedforward": 2 * WIDTH, "dropout": 0.0, "activation": "gelu", "batch_first": True}
        blocks = [nn.TransformerEncoderLayer(WIDTH, heads, norm_first=True, **layer) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(SHAPES))

    def forward(self, images):
        words = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(words)).mean(1))


def drawn(count, seed):
    """Images (count, 1, SIZE, SIZE) with noise, and which shape each shows."""
    random = torch.Generator().manual_seed(seed)
    kind = torch.randint(len(SHAPES), (count,), generator=random)
    radius, down, right = 4 * torch.rand(3, count, 1, 1, generator=random) + 6
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    y, x = (rows - down - 3).abs(), (columns - right - 3).abs()
    far, side = (x**2 + y**2).sqrt(), torch.maximum(x, y)
    cross = (torch.minimum(x, y) < 2) & (side < radius)
    shapes = torch.stack([far < radius, (far - radius + 1.5).abs() < 1.5, side < 0.9 * radius, cross])
    images = shapes[kind, torch.arange(count)].float()
    return (images + 0.1 * torch.randn(images.shape, generator=random)).unsqueeze(1), kind


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()
lamina.init(partitions=2, microbatches=4, ddp=True)
torch.manual_seed(0)
model = lamina.DistributedModel(ViT())
optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))


@lamina.step
def train_step(images, kinds):
    logits = model(images)
    loss = F.cross_entropy(logits, kinds, label_smoothing=0.05)
    model.backward(loss)
    return (logits.argmax(1) == kinds).float().mean()


for step in range(1, args.steps + 1):
    images, kinds = drawn(64 // lamina.dp_size(), seed=step * lamina.dp_size() + lamina.dp_rank())
    optimizer.zero_grad()
    right = train_step(images, kinds).reduce_mean()
    optimizer.step()
    if lamina.rank() == 0 and (step == 1 or step % 25 == 0):
        print(f"step {step}: {right.item():.0%} of images not seen before are right")
