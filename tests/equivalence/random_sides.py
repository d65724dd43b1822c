# SPDX-License-Identifier: Apache-2.0
"""The two sides of a comparison: lamina, and a plain loop over the same microbatches. With dropout the other side is
lamina in a world of one, since only lamina knows a microbatch's random numbers.
"""

import contextlib
import os
import random
from collections.abc import Iterable

import torch
from equivalence.cases import adamw, on_host
from equivalence.random_cases import RandomCase
from equivalence.random_training import Model, Trained, build, evaluation_body, states, train, train_body
from torch import nn

import lamina

TIMEOUT_S = 30.0  # no case takes a second


def plain(case: RandomCase, make_optimizer=adamw) -> Trained:
    model = build(case)
    optimizer = make_optimizer(model.parameters())
    sizes = [rows for batch in case.sizes for rows in batch]
    weight = 0.0  # of the microbatch that trains

    def backward(tensors, gradients=None):
        tensors = tensors if isinstance(tensors, list) else [tensors]
        gradients = [torch.ones_like(t) for t in tensors] if gradients is None else [gradients]
        torch.autograd.backward(tensors, [gradient * weight for gradient in gradients])

    def microbatches(batch):
        nonlocal weight
        for at, piece in enumerate(zip(*(tensor.split(sizes) for tensor in batch.values()), strict=True)):
            weight = sizes[at] / sum(sizes)
            yield at, piece

    def step(batch):
        return {at: detached(train_body(case, model, backward, *piece)) for at, piece in microbatches(batch)}

    def evaluate(batch):
        return {at: evaluation_body(model, *piece) for at, piece in microbatches(batch)}

    def clip(norm):
        return nn.utils.clip_grad_norm_(model.parameters(), norm)

    trained = train(case, model, optimizer, step, evaluate, clip, model.named_parameters)
    trained.buffers = dict(model.named_buffers())
    trained.others |= states(optimizer)
    return trained


def detached(tree: dict) -> dict:
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in tree.items()}


def distributed(case: RandomCase, make_optimizer=adamw, **config) -> Trained:
    manual = {"auto_partition": False, "default_partition": 0} if case.placed_by_hand else {}
    replicas = {"ddp": True} if case.replicas > 1 else {}
    keys = {
        "partitions": case.partitions,
        "microbatches": case.microbatches,
        "active_microbatches": case.active_microbatches,
        "schedule": case.schedule,
        "seed": case.number,
        "timeout_s": TIMEOUT_S,
    }
    lamina.init(**(keys | manual | replicas | config))
    try:
        model = build(case)
        if case.placed_by_hand:
            place_by_hand(model, case.number)
        model = lamina.distribute(model)
        return train_here(case, model, lamina.DistributedOptimizer(make_optimizer(model.parameters())))
    finally:
        lamina.shutdown()


def train_here(case: RandomCase, model, optimizer, named_parameters=None) -> Trained:
    """Trains on this rank of a job.

    Args:
        named_parameters: gives the parameters to compare, with their gradients; None for those of this rank.
    """

    @lamina.step
    def train_step(model, x, y, tokens):
        return train_body(case, model, model.backward, x, y, tokens)

    @lamina.step
    def evaluation_step(model, x, y, tokens):
        return evaluation_body(model, x, y, tokens)

    def own(batch):
        """This replica's part of the batch; only the leading rank's inputs count, so the others pass nonsense."""
        if lamina.pp_rank() != 0:
            return dict.fromkeys(batch, torch.empty(case.microbatches, 0))
        return {name: tensor.split(sizes)[index] for name, tensor in batch.items()}

    index, count = copy_here(case)
    sizes = [sum(rows) for rows in case.sizes] if count > 1 else [sum(map(sum, case.sizes))]

    def step(batch):
        return by_microbatch(train_step(model, **own(batch)), index)

    def evaluate(batch):
        return by_microbatch(evaluation_step(model, **own(batch)), index)

    def clip(norm):
        return model.clip_grad_norm_(norm)

    named_parameters = named_parameters or model.local_named_parameters
    trained = train(case, model, optimizer, step, evaluate, clip, named_parameters, lamina.device())
    trained.buffers = on_host(dict(model.local_named_buffers()))
    if lamina.pp_rank() != 0:  # the inputs live on the leading rank
        trained.others = {name: value for name, value in trained.others.items() if "input" not in name}
    assert set(trained.parameters) <= set(model.state_dict()), "names of parameters are not those of the state dict"
    return trained


def copy_here(case: RandomCase) -> tuple[int, int]:
    """The place of this rank's batch among those side by side, and how many these are."""
    if lamina.size() == 1:
        return 0, 1
    return lamina.rdp_rank() if case.copies == case.replicas else lamina.dp_rank(), case.copies


def by_microbatch(outputs: dict, copy: int) -> dict[int, dict]:
    """The outputs of a copy, by microbatch of the whole batch."""
    count = lamina.num_microbatches()
    pieces = {
        name: value.outputs if isinstance(value, lamina.StepOutput) else value or [None] * count
        for name, value in outputs.items()
    }
    return {copy * count + at: {name: pieces[name][at] for name in pieces} for at in range(count)}


def place_by_hand(model: Model, number: int, together: Iterable[Iterable[nn.Module]] = ()) -> None:
    """Every module anywhere; together those that share a parameter, or of which one reads the other's parameters, and
    those that are said to be."""
    draw = random.Random(number)
    group = {module: {module} for module in model.modules()}

    def join(module: nn.Module, other: nn.Module) -> None:
        group[module] |= group[other]
        group.update(dict.fromkeys(group[module], group[module]))

    holders = {}
    for module in model.modules():
        for other in [holders.setdefault(p, module) for p in module.parameters(recurse=False)] + list(
            module.__dict__.get("reads", [])
        ):
            join(module, other)
    for first, *others in map(list, together):
        for other in others:
            join(first, other)
    placed = {}
    for module in model.modules():
        partition = placed.setdefault(id(group[module]), draw.randrange(lamina.pp_size()))
        lamina.set_partition(module, partition)


@contextlib.contextmanager
def world_of_one():
    """Inside, this process is no rank of a job."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    saved = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(saved)


def reference(case: RandomCase) -> Trained:
    if "dropout" not in case.traits:
        return plain(case)
    with world_of_one():
        return distributed(case, partitions=1, default_partition=0, microbatches=case.microbatches * case.replicas)
