# SPDX-License-Identifier: Apache-2.0
"""Trains a classifier in a pipeline, and evaluates it on a number of samples that nothing divides.

    lamina run -n 2 examples/evaluation.py     two partitions
    lamina run -n 4 examples/evaluation.py     two copies of them, each of which evaluates its share

What it prints is the same on any number of ranks.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import lamina

lamina.init(partitions=2, microbatches=4, ddp=True)
torch.manual_seed(0)
points = torch.randn(1024 + 333, 2)
labels = (points.square().sum(1) < 1.4).long()  # inside of a circle or not
data = TensorDataset(points, labels)
training, held_out = Subset(data, range(1024)), Subset(data, range(1024, len(data)))
net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
model = lamina.DistributedModel(net)
optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


@lamina.step
def train_step(x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


@lamina.step
def evaluate_step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(x)
    return F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum()


@torch.no_grad()
def evaluate(data):
    """The mean loss and the share of right answers; every rank calls it and gets the same."""
    model.eval()
    sampler = lamina.dist.get_sampler(data, exact=True)
    loss = right = 0.0
    for (x, y), weight in lamina.dist.exact_batches(DataLoader(data, batch_size=50, sampler=sampler)):
        batch_loss, batch_right = evaluate_step(x, y)
        if weight > 0:  # else this copy has no samples left, and takes part for the others
            loss += batch_loss.reduce_sum().item()
            right += batch_right.reduce_sum().item()
    model.train()
    sums = lamina.allgather((loss, right), lamina.DP_GROUP)  # of each copy
    return [sum(of_copies) / len(data) for of_copies in zip(*sums, strict=True)]


sampler = lamina.dist.get_sampler(training, shuffle=True)
loader = DataLoader(training, batch_size=128 // lamina.dp_size(), sampler=sampler)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        train_step(x, y)
        optimizer.step()
    loss, accuracy = evaluate(held_out)
    if lamina.rank() == 0:
        print(f"epoch {epoch}: loss {loss:.4f}, {accuracy:.1%} of {len(held_out)} are right")
