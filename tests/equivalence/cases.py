# SPDX-License-Identifier: Apache-2.0
"""One case: a model, a layout and a dtype, trained by lamina and by a plain loop, and compared.

[Note: equal] Two tensors a and b are equal when max|a-b| <= tol * max(max|b|, 1e-3 of the model's largest value). In
float64, tol is 1e-9 for loss, gradients and parameters after 3 steps. In float32 it is 1e-5 for the loss and the
gradients of the first step, and for parameters with AdamW's eps at 1e-4. With the usual eps AdamW turns rounding noise
in near-zero gradients into steps of size lr.
"""

import os
import random
from dataclasses import dataclass

import torch
from equivalence.models import MODELS, WIDTH

import lamina

STEPS = 3
BATCH = 8


@dataclass(frozen=True)
class Case:
    model: str
    schedule: str
    microbatches: int
    dtype: str = "float64"
    placement_seed: int | None = None  # None: automatic; else every module where a generator with that seed puts it

    @property
    def name(self) -> str:
        placed = "auto" if self.placement_seed is None else f"hand{self.placement_seed}"
        return f"{self.model}-{self.schedule}-m{self.microbatches}-{self.dtype}-{placed}"


@dataclass
class Trained:
    losses: list
    first_gradients: dict
    gradients: dict
    parameters: dict


def batches(dtype):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for _ in range(STEPS)]


def build(case: Case):
    torch.manual_seed(11)
    return MODELS[case.model]().to(getattr(torch, case.dtype))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-4)


def snapshot(named):
    return {n: None if p.grad is None else p.grad.cpu().clone() for n, p in named}


def on_host(named):
    """Values as they are compared, wherever a rank computes."""
    return {name: None if tensor is None else tensor.detach().cpu() for name, tensor in named.items()}


def plain(case: Case) -> Trained:
    model = build(case)
    optimizer = adamw(model.parameters())
    losses, first = [], None
    for x in batches(getattr(torch, case.dtype)):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        losses.append(loss.item())
        first = first or snapshot(model.named_parameters())
        optimizer.step()
    return Trained(losses, first, snapshot(model.named_parameters()), dict(model.named_parameters()))


def place_by_hand(model, case: Case) -> None:
    """Every module anywhere; those that share a parameter together."""
    draw = random.Random(case.placement_seed)
    together = {}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        partition = next((together[p] for p in own if p in together), draw.randrange(lamina.pp_size()))
        together.update({p: partition for p in own})
        lamina.set_partition(module, partition)


def distributed(case: Case) -> Trained:
    manual = {} if case.placement_seed is None else {"auto_partition": False, "default_partition": 0}
    lamina.init(
        partitions=int(os.environ["WORLD_SIZE"]), microbatches=case.microbatches, schedule=case.schedule, **manual
    )
    model = build(case)
    if case.placement_seed is not None:
        place_by_hand(model, case)
    model = lamina.distribute(model)
    optimizer = lamina.DistributedOptimizer(adamw(model.parameters()))

    @lamina.step
    def train(model, x):
        loss = model(x)
        model.backward(loss)
        return loss

    losses, first = [], None
    for x in batches(getattr(torch, case.dtype)):
        optimizer.zero_grad()
        # Only the leading rank's inputs count: the others pass nonsense.
        loss = train(model, (x if lamina.pp_rank() == 0 else torch.empty(BATCH, 0)).to(lamina.device()))
        losses.append(loss.reduce_mean().item())
        first = first or snapshot(model.local_named_parameters())
        optimizer.step()
    local = dict(model.local_named_parameters())
    full = model.state_dict()
    assert set(local) <= set(full), "names of local parameters are not those of the state dict"
    lamina.shutdown()
    return Trained(losses, first, snapshot(local.items()), on_host(local))


def difference(ours: dict, theirs: dict, tolerance: float, what: str) -> list[str]:
    """Lists what is not equal, by [Note: equal]; `ours` may hold a part of the names."""
    largest = max((t.abs().max().item() for t in theirs.values() if t is not None and t.numel()), default=0.0)
    wrong = []
    for name, a in ours.items():
        b = theirs.get(name)
        if (a is None) != (b is None):
            wrong.append(f"{what} {name}: {'None' if a is None else 'a tensor'} here, not in the plain run")
        elif a is not None and (a.shape, a.dtype) != (b.shape, b.dtype):
            wrong.append(f"{what} {name}: {tuple(a.shape)}, {a.dtype} here, {tuple(b.shape)}, {b.dtype} there")
        elif a is not None:
            bound = tolerance * max(b.abs().max().item(), 1e-3 * largest)
            error = (a - b).abs().max().item()
            if not error <= bound:
                wrong.append(f"{what} {name}: off by {error:.3g}, allowed {bound:.3g}")
    return wrong


def check(case: Case) -> list[str]:
    """The differences between the two ways of training, on this rank; an empty list is the promise kept."""
    ours, theirs = distributed(case), plain(case)
    exact = case.dtype == "float64"
    tolerance = 1e-9 if exact else 1e-5
    wrong = [
        f"loss of step {i}: {a} here, {b} plain"
        for i, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True))
        if not abs(a - b) <= tolerance * max(abs(b), 1e-3) and (exact or i == 0)
    ]
    with torch.no_grad():
        wrong += difference(ours.first_gradients, theirs.first_gradients, tolerance, "first gradient of")
        wrong += difference(ours.parameters, theirs.parameters, tolerance, "parameter")
        if exact:
            wrong += difference(ours.gradients, theirs.gradients, tolerance, "gradient of")
    return wrong
