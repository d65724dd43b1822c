# SPDX-License-Identifier: Apache-2.0
"""Cases for four ranks that change the layout of their job while it trains."""

import gc
import os
import pathlib

import pytest
import torch
from torch import nn

import lamina

RANK = int(os.environ.get("RANK", 0))
STEPS, ROWS, MICROBATCHES = 8, 16, 8  # of a batch of all copies


class Scaled(nn.Module):
    """Multiplies by a buffer that no state dict has, and another one that counts its calls in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((5,), 0.5), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        return x * self.scale


def layers(dtype=torch.float64, dropout=0.0):
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 5),
        nn.Tanh(),
        Scaled(),
        nn.Linear(5, 7),
        nn.LayerNorm(7),
        nn.Dropout(dropout),
        nn.GELU(),
        nn.Linear(7, 4),
        nn.Tanh(),
        nn.Linear(4, 1),
    ).to(dtype)


def batch(number, dtype=torch.float64):
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(dtype)


def start(copies=4, **keys):
    lamina.init(
        **({"partitions": 4 // copies, "ddp": True, "microbatches": MICROBATCHES // copies, "timeout_s": 60} | keys)
    )


class Training:
    """A training of a model in a job, or in no job."""

    def __init__(self, make, dtype=torch.float64, dropout=0.0, distributed=True, clip=None, **scaling):
        module = layers(dtype, dropout)
        self.model = lamina.distribute(module) if distributed else module
        self.optimizer = make(self.model.parameters())
        if distributed:
            self.optimizer = lamina.DistributedOptimizer(self.optimizer, **scaling)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.dtype, self.distributed, self.clip, self.number = dtype, distributed, clip, 0

        @lamina.step
        def step(x):
            loss = self.model(x).square().mean()
            self.model.backward(loss)
            return loss

        self.step_function = step

    def step(self):
        """Returns the loss of the next batch."""
        x = batch(self.number, self.dtype)
        self.number += 1
        self.optimizer.zero_grad()
        if self.distributed:
            loss = self.step_function(x.chunk(lamina.dp_size())[lamina.dp_rank()]).reduce_mean()
            losses = lamina.allgather(loss.item(), lamina.DP_GROUP)
            loss = sum(losses) / len(losses)
        else:
            loss = self.model(x).square().mean()
            loss.backward()
            loss = loss.item()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def plain(make, dtype=torch.float64, clip=None):
    """The losses and the state of one process that trains on whole batches."""
    training = Training(make, dtype, distributed=False, clip=clip)
    return [training.step() for _ in range(STEPS)], training


def agree(losses, expected, tolerance=1e-12):
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance)


def states_agree(training, expected, tolerance=1e-12):
    """Compares the whole state of the model and of its optimizer; collective."""
    for name, value in training.model.state_dict().items():
        torch.testing.assert_close(value, expected.model.state_dict()[name], rtol=tolerance, atol=tolerance)
    mine, its = training.optimizer.state_dict(), expected.optimizer.state_dict()
    assert mine["state"].keys() == its["state"].keys()
    for number, state in its["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][number][key], value, rtol=tolerance, atol=tolerance)
    assert [group["lr"] for group in mine["param_groups"]] == [group["lr"] for group in its["param_groups"]]


WAYS = {
    "copies to partitions and back": (4, {2: {"partitions": 4}, 5: {"partitions": 1}}),
    "partitions to copies": (1, {3: {"partitions": 1}}),
    "each to each": (4, {1: {"partitions": 4}, 3: {"partitions": 2}, 4: {"partitions": 1}, 6: {"partitions": 2}}),
    "placed in another way": (2, {2: {"placement_strategy": "spread"}, 5: {"placement_strategy": "cluster"}}),
}


def run(training, changes, steps=STEPS):
    """Trains with changes of the layout, by the step before which they come. Returns the losses."""
    losses = []
    for number in range(steps):
        if number in changes:
            lamina.change(**changes[number])
        losses.append(training.step())
    return losses


def changed(copies, changes, make, **options):
    start(copies)
    training = Training(make, **options)
    objects = [training.model, *training.model.parameters(), training.optimizer, *training.optimizer.param_groups]
    losses = run(training, changes)
    kept = [training.model, *training.model.parameters(), training.optimizer, *training.optimizer.param_groups]
    assert list(map(id, objects)) == list(map(id, kept))
    return losses, training


def case_losses_and_states_are_those_of_one_process_whatever_the_layouts():
    for make in (adamw, momentum):
        expected, one = plain(make)
        for copies, changes in WAYS.values():
            losses, training = changed(copies, changes, make)
            agree(losses, expected)
            states_agree(training, one)
            lamina.shutdown()


def case_gradients_are_clipped_as_in_one_process():
    expected, one = plain(adamw, clip=0.05)
    losses, training = changed(4, {2: {"partitions": 2}, 5: {"partitions": 4}}, adamw, clip=0.05)
    agree(losses, expected)
    states_agree(training, one)


def case_float32_agrees_to_its_own_digits():
    expected, _ = plain(adamw, torch.float32)
    losses, _ = changed(4, {2: {"partitions": 4}, 5: {"partitions": 2}}, adamw, dtype=torch.float32)
    agree(losses, expected, 1e-6)


def case_random_numbers_go_on():
    runs = []
    for changes in ({}, {2: {"partitions": 4}, 4: {"partitions": 2}, 6: {"partitions": 1}}):
        start(4, seed=5)
        training = Training(adamw, dropout=0.5)
        losses = []
        for number in range(STEPS):
            if number in changes:
                lamina.change(**changes[number])
            losses.append(training.step())
        assert lamina.rng_step() == STEPS
        runs.append(losses)
        lamina.shutdown()
    agree(*runs)


def case_each_rank_has_its_part_alone_afterwards():
    start(1)
    training = Training(adamw)
    training.step()
    lamina.change(partitions=1)
    assert all(parameter.grad is None for parameter in training.model.parameters())
    whole = sum(parameter.untyped_storage().nbytes() for parameter in training.model.parameters())
    training.step()
    lamina.change(partitions=4)
    own = sum(parameter.untyped_storage().nbytes() for parameter in training.model.local_parameters())
    assert sum(lamina.allgather(own, lamina.WORLD)) == whole
    assert own < whole
    states = [state for state in training.optimizer.state.values() if state]
    assert len(states) == len(list(training.model.local_parameters()))


def descriptors():
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def case_many_changes_take_no_more_memory_or_descriptors():
    start(4)
    training = Training(adamw)
    seen = []
    for number in range(24):
        training.step()
        lamina.change(partitions=(1, 2, 4)[number % 3])
        if number % 6 == 5:
            gc.collect()
            alive = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
            seen.append((descriptors(), alive))
    assert seen[-1] <= seen[1], seen


def case_microbatches_are_shared_out():
    start(4, microbatches=2)
    training = Training(momentum)
    training.step()
    lamina.change(partitions=4)
    assert lamina.num_microbatches() == 8
    lamina.change(partitions=2)
    assert lamina.num_microbatches() == 4
    lamina.change(partitions=1, microbatches=4)
    assert lamina.num_microbatches() == 4


def case_copies_share_out_microbatches_one_more_or_less():
    expected, whole = plain(adamw)
    start(1)
    lamina.set_num_microbatches(3)
    training = Training(adamw)
    agree(run(training, {2: {"partitions": 2}, 5: {"partitions": 1}}), expected)
    assert lamina.num_microbatches() == 1, "each of four copies has one at least"
    lamina.change(partitions=4)
    assert lamina.num_microbatches() == 3
    states_agree(training, whole)


def refused(match, kind=lamina.UsageError, **keys):
    with pytest.raises(kind, match=match):
        lamina.change(**keys)


def case_what_cannot_change_is_refused_and_nothing_is_lost():
    expected, _ = plain(adamw)
    start(1)
    training = Training(adamw)
    losses = [training.step() for _ in range(3)]
    refused("partitions", lamina.ConfigError, partitions=3)
    refused("fp16.*no key of a layout", fp16=True)
    refused("given different|different arguments", partitions=2 if RANK else 1)
    training.step_function(batch(3))
    refused("has a gradient", partitions=2)
    training.optimizer.zero_grad()
    losses.append(training.step())

    @lamina.step
    def inside(x):
        refused("inside a step", partitions=2)
        return training.model(x).sum()

    with torch.no_grad():
        inside(batch(0))
    losses += [training.step() for _ in range(STEPS - 4)]
    agree(losses, expected)


def case_layouts_that_are_not_supported_are_refused():
    start(4, ddp=False)
    refused("train apart", partitions=2)


def case_plain_optimizers_and_parameters_beside_the_model_are_refused():
    start(4)
    model = lamina.distribute(layers())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    refused("SGD updates the model, and is no DistributedOptimizer", partitions=2)
    lamina.shutdown()
    start(4)
    model = lamina.distribute(layers())
    beside = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    lamina.DistributedOptimizer(torch.optim.SGD([*model.parameters(), beside], lr=0.1))
    refused("not the model's", partitions=2)


def case_groups_that_ranks_know_differently_are_refused():
    start(1)
    training = Training(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    training.step()
    if RANK == 0:
        del training.optimizer.param_groups[0]["params"][0]
    refused("groups of an optimizer have other parameters", partitions=2)
