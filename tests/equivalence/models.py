# SPDX-License-Identifier: Apache-2.0
"""Small models, each with one thing that a pipeline can get wrong. None knows of lamina.

Every model maps x (B, 8), floating, to a loss per call; `WIDTH` is 8.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """Modules one after the other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.layers(x)).square().mean()


class Skips(nn.Module):
    """Every layer reads the outputs of all before it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.mix = nn.ModuleList(nn.Linear(WIDTH * (i + 1), WIDTH) for i in range(4))

    def forward(self, x):
        seen = [x]
        for layer, mix in zip(self.layers, self.mix, strict=True):
            seen.append(layer(mix(torch.cat(seen, dim=-1))))
        return (seen[-1] * seen[1]).mean() + seen[2].square().mean()


class SharedWeights(nn.Module):
    """Embedding and head have one weight, and two layers have one bias."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = Block()
        self.second = Block()
        self.second.up.bias = self.first.up.bias
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return F.log_softmax(self.head(self.second(self.first(self.embedding(x)))), dim=-1)[:, 0].neg().mean()


class Caller(nn.Module):
    """A module that calls one it was given, which others call too."""

    def __init__(self, shared):
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.shared = shared

    def forward(self, x):
        return self.shared(torch.tanh(self.own(x))) + self.shared(x)


class Repeated(nn.Module):
    """One module called many times, from several parents and in a loop."""

    def __init__(self):
        super().__init__()
        self.shared = Block()
        self.left = Caller(self.shared)
        self.right = Caller(self.shared)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for _ in range(2):
            x = self.left(x) - self.right(x)
        return self.head(self.shared(x)).square().mean()


@dataclass
class Pair:
    first: torch.Tensor
    rest: dict


class Structured(nn.Module):
    """Keyword arguments, containers, None, numbers and texts, in and out; integer outputs; unused outputs."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)
            self.b = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs, *, scale, mode="tanh", mask=None, rows=slice(None)):
            x, (y, extra) = inputs["x"], inputs["more"]
            assert extra is None and mode in ("tanh", "relu") and isinstance(scale, float)
            a = getattr(torch, mode)(self.a(x[rows])) * scale
            b = self.b(y) if mask is None else self.b(y).masked_fill(mask, 0.0)
            return Pair(a, {"b": b, "arg": b.argmax(-1), "none": None, 3: [a.detach(), (b * 2, "text")]})

    def __init__(self):
        super().__init__()
        self.before = Block()
        self.inner = self.Inner()
        self.after = self.Inner()

    def forward(self, x):
        h = self.before(x)
        one = self.inner({"x": h, "more": (x, None)}, scale=0.5, mode="tanh")
        mask = one.first > 0.2
        two = self.after(
            {"x": one.first, "more": (one.rest[3][1][0], None)}, scale=2.0, mode="relu", mask=mask, rows=slice(0, None)
        )
        picked = two.rest["b"].gather(1, one.rest["arg"].unsqueeze(1))
        return two.first.mean() + picked.square().mean() + (one.first * mask).sum() / x.numel()


class SharedContainer(nn.Module):
    """One list of modules inside two parents; a module without parameters; a frozen one; one that is never called."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.again = nn.ModuleList([self.layers[1], self.layers[0]])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        for layer in (*self.layers, self.frozen, *self.again):
            x = self.act(layer(x) + 0)
        return x.square().mean()


class InPlace(nn.Module):
    """Modules that write their arguments, results that are written by their caller, data that decides the way."""

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.linear(x)
            return x.mul_(2).add_(0.5), x.sum(-1)

    def __init__(self):
        super().__init__()
        self.first = self.Writes()
        self.second = self.Writes()
        self.small = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y, s = self.first(x)
        y += 1
        z, t = self.second(y)
        if z.abs().mean().item() > 0.05:  # control flow on data
            z = self.small(z)
        z[:, 0] = s + t
        return z.square().mean()


MODELS = {m.__name__: m for m in (Chain, Skips, SharedWeights, Repeated, Structured, SharedContainer, InPlace)}
