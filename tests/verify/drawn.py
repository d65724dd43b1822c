# SPDX-License-Identifier: Apache-2.0
"""Draws from a number a model, a layout, and a way to train that `lamina verify` is to find equal in both runs.

Every third is a random model of tests/equivalence with all its traits; the others are models of a kind, some of them
such as users write, with other optimizers, kinds of numbers and layouts.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from equivalence.models import MODELS, WIDTH
from equivalence.random_cases import RandomCase, draw_case
from torch import nn
from torch.utils.checkpoint import checkpoint
from verify import real

import lamina

STEPS = 3
ROWS = 8  # of a copy's batch


class Experts(nn.Module):
    """Each row goes through the expert that a router picks, weighted by the router."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))

    def forward(self, x):
        weight, picked = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (picked == number).nonzero().squeeze(-1)
            if rows.numel() > 0:
                y = y.index_add(0, rows, expert(x[rows]) * weight[rows].unsqueeze(-1))
        return x + y


class Stack(nn.Module):
    """Layers one after the other, with a loss."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.layers(x)).float().square().mean()


class Checkpointed(Stack):
    """Recomputes each layer in the backward."""

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x).float().square().mean()


class Attention(nn.Module):
    """A transformer's layer over groups of rows, with dropout."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x.unsqueeze(1)).squeeze(1)


class Convolutions(nn.Module):
    """Convolutions with BatchNorm."""

    def __init__(self):
        super().__init__()
        layers = [[nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.ReLU()] for _ in range(3)]
        self.layers = nn.Sequential(*(each for layer in layers for each in layer))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        y = self.layers(torch.stack([x, x.flip(-1)], 1))
        return self.head(y.mean(1)).float().square().mean()


class Recurrent(nn.Module):
    """A recurrent layer between others."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.after = nn.Linear(WIDTH, 1)

    def forward(self, x):
        y, _ = self.recurrent(torch.stack([self.before(x), x], 1))
        return self.after(y).float().square().mean()


def layer(*extra):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *extra, nn.Tanh())


KINDS: dict[str, Callable[[], nn.Module]] = MODELS | {
    "experts": lambda: Stack([Experts() for _ in range(3)]),
    "batch_norm": lambda: Stack([layer(nn.BatchNorm1d(WIDTH)) for _ in range(4)]),
    "dropout": lambda: Stack([layer(nn.Dropout(0.2)) for _ in range(4)]),
    "checkpointed": lambda: Checkpointed([layer() for _ in range(4)]),
    "checkpointed_dropout": lambda: Checkpointed([layer(nn.Dropout(0.2)) for _ in range(4)]),
    "attention": lambda: Stack([Attention() for _ in range(3)]),
    "convolutions": Convolutions,
    "recurrent": Recurrent,
}
# Models that rounding to few bits sends another way.
NOT_HALF = {"InPlace", "Structured", "experts", "convolutions", "batch_norm"}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lamb": lambda p: lamina.optim.LAMB(p, lr=1e-2),
    "fused": lambda p: lamina.optim.AdamW(p, lr=1e-2),
}


@dataclass(frozen=True)
class DrawnCase:
    number: int
    model: str  # of KINDS, or of real.MODELS, or "random"
    random: RandomCase | None
    keys: dict[str, Any] = field(default_factory=dict)  # of lamina.init
    optimizer: str = "adamw"
    dtype: str = "float32"
    loop: bool = False  # without a step function
    clip: bool = False
    by_hand: bool = False  # placed so

    @property
    def name(self) -> str:
        words = [self.model, self.optimizer, self.dtype, *(["loop"] * self.loop), *(["clip"] * self.clip)]
        keys = ",".join(f"{key}={value}" for key, value in self.keys.items() if key != "timeout_s")
        return f"{self.number}-{'-'.join(words)}-{keys}" + (f"-{self.random.name}" if self.random else "")


def draw(number: int, world: int, partitions: int) -> DrawnCase:
    """The case of that number in so many ranks: always the same."""
    drawn = random.Random(number * 100 + world * 10 + partitions)
    copies = world // partitions
    keys: dict[str, Any] = {"partitions": partitions, "timeout_s": 60} | _copies(drawn, copies)
    if number % 3 == 0:
        case = draw_case(drawn.randrange(5000))
        if copies > 1:
            case = replace(case, traits=case.traits - {"input_gradient", "retained"})
        case = replace(case, partitions=partitions, replicas=copies)
        return DrawnCase(number, "random", case, keys, drawn.choice(list(OPTIMIZERS)))
    dtype = drawn.choice(("float32", "float32", "float64", "bfloat16", "float16"))
    names = sorted(KINDS) if number % 3 == 1 or dtype == "float64" else sorted(real.MODELS)
    model = drawn.choice(names)
    if model in NOT_HALF or (model in real.MODELS and model in real.NOT_HALF):
        dtype = "float32"
    keys |= {"microbatches": drawn.choice((1, 2, 4)), "schedule": drawn.choice(("simple", "interleaved"))}
    keys |= {"float16": {"fp16": True}, "bfloat16": {"bf16": True}}.get(dtype, {})
    by_hand = partitions > 1 and model in KINDS and drawn.random() < 0.3
    keys |= {"auto_partition": False, "default_partition": 0} if by_hand else {}
    loop = partitions == 1 and drawn.random() < 0.4
    if loop:
        keys["microbatches"] = 1
    sharded = "sharded_data_parallel_degree" in keys
    return DrawnCase(
        number,
        model,
        None,
        keys,
        drawn.choice(list(OPTIMIZERS)),
        dtype,
        loop,
        not sharded and drawn.random() < 0.3,
        by_hand,
    )


def _copies(drawn: random.Random, copies: int) -> dict[str, Any]:
    if copies == 1:
        return {}
    sharded = {"sharded_data_parallel_degree": copies, "sdp_param_persistence_threshold": drawn.choice((0, 20))}
    sharded["sdp_gradient_clipping"] = drawn.choice((1e9, 0.1))
    return {"ddp": True} | drawn.choice(({}, {"shard_optimizer_state": True}, sharded, sharded))
