# SPDX-License-Identifier: Apache-2.0
"""The modules that random models are made of. None knows of lamina.

A *part* maps x (B, T, WIDTH), floating, to a tensor of that shape. A Composite is a part that calls other parts: its
program is a list of operations, each of which computes a tensor from two earlier ones. `SIMPLE` are the parts that any
operation may call; an operation that needs a part of its own kind says so in `random_operations.OPERATIONS`.
"""

from types import SimpleNamespace
from typing import NamedTuple

import torch
from equivalence.models import WIDTH, Block, Pair
from torch import nn

VOCABULARY = 5


class Embedding(nn.Module):
    """Integer arguments."""

    takes_tokens = True

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, x, tokens):
        return x + self.table(tokens)


class BatchNorm(nn.Module):
    """Buffers that a forward writes. Without momentum their values do not depend on the order of the microbatches.

    The large eps keeps several in a row from blowing rounding up where a microbatch hardly varies.
    """

    def __init__(self, momentum=None):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, eps=0.1, momentum=momentum)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Mode(nn.Module):
    """Does something else in evaluation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) if self.training else self.linear(2 * x)


class Writer(nn.Module):
    """Writes its argument."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x.mul_(0.5).add_(self.shift)
        return self.linear(x)


class Aliases(nn.Module):
    """Outputs that share memory."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(x)
        return y, y.detach(), y


class Triple(NamedTuple):
    tensor: torch.Tensor
    dtype: torch.dtype
    nothing: None


class Structured(nn.Module):
    """Containers, keywords, None, numbers, texts and slices, in and out."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs, *, scale, mode="tanh", mask=None, rows=slice(None)):
        x, (y, extra) = inputs["x"], inputs["more"]
        assert extra is None and mode in ("tanh", "relu") and isinstance(scale, float)
        a = getattr(torch, mode)(self.a(x[rows])) * scale
        b = self.b(y) if mask is None else self.b(y).masked_fill(mask.unsqueeze(-1), 0.0)
        return Pair(a, {"b": b, "none": None, 3: [a.detach(), (b * 2, mode)], "sum": b.sum(), "empty": b[:0]})


class Sieve(nn.Module):
    """An argument that has no effect, and an output for nobody."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, without_effect):
        return self.used(x), self.unused(x), without_effect.detach()


class Objects(nn.Module):
    """Objects of classes that are no containers, out, and modules, in."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, module):
        y = self.linear(x)
        return SimpleNamespace(value=y + module(x), flags={"a", 1}, triple=Triple(y, torch.float64, None))


class Picker(nn.Module):
    """Integer outputs; its parameters never have a gradient."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.score(x).argmax(-1)


class Giver(nn.Module):
    """Gives its parameter away."""

    def __init__(self):
        super().__init__()
        self.vector = nn.Parameter(torch.randn(WIDTH))

    def forward(self):
        return self.vector


class Scaler(nn.Module):
    """Works with a parameter of its caller."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, gain):
        return self.linear(x) * gain


class Attend(nn.Module):
    """No parameters, and no class of torch's."""

    def forward(self, x):
        return torch.softmax(x @ x.transpose(1, 2), -1) @ x


def tanh_layer():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def relu_layer():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))


def dropout_layer():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), Block())


# Every third has no parameters: what it is called with goes through it all the same.
SIMPLE = ("linear", "linear", "tanh", "relu", "block", "block", "gelu", "drop", "attend")
# Returns what may be written right after it was received: nothing that torch saved for the backward.
WRITABLE = ("linear", "block", "composite")

KINDS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "tanh": tanh_layer,
    "relu": relu_layer,
    "block": Block,
    "gelu": nn.GELU,
    "drop": lambda: nn.Dropout(0.3),
    "attend": Attend,
    "embedding": Embedding,
    "batch_norm": BatchNorm,
    "ordered_batch_norm": lambda: BatchNorm(momentum=0.1),
    "dropout": dropout_layer,
    "mode": Mode,
    "writer": Writer,
    "aliases": Aliases,
    "structured": Structured,
    "sieve": Sieve,
    "objects": Objects,
    "identity": nn.Identity,
    "picker": Picker,
    "giver": Giver,
    "scaler": Scaler,
}
