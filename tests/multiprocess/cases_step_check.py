# SPDX-License-Identifier: Apache-2.0
"""Cases of `verify_steps`, for two ranks that are one pipeline."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lamina
from lamina.errors import UsageError
from lamina.job import current
from lamina.torch_patches import module_call
from lamina.verification.plain_model import PlainModel


class Doubled(torch.autograd.Function):
    """Doubles gradients on their way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def hooked(layer, y):
    """Alters the gradient of a weight alone."""
    layer.linear.weight.register_hook(lambda gradient: 1.5 * gradient)
    return y


FAULTS = {
    "none": lambda layer, y: y,
    "scaled": lambda layer, y: y * 1.001,
    "noise": lambda layer, y: y + 0.01 * torch.rand_like(y),
    "not finite": lambda layer, y: torch.where(y == y.max(), torch.inf, y),
    "gradient": lambda layer, y: Doubled.apply(y),
    "dropped": lambda layer, y: y.detach(),
    "part": lambda layer, y: torch.cat([y[:1].detach(), y[1:]]),
    "of a weight": hooked,
}
BY_HAND = {"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0, "timeout_s": 30}
SHARDED = {
    "partitions": 1,
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "auto_partition": True,
    "default_partition": None,
}


class Layer(nn.Module):
    """Draws, counts, keeps statistics, and may have a fault on the last rank, where it is not called plainly."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.2)
        self.fault, self.counts, self.calls = "none", False, 0

    def forward(self, x):
        self.calls += self.counts
        y = self.dropout(torch.relu(self.norm(self.linear(x))))
        return x + (FAULTS[self.fault](self, y) if self.is_spoiled() else y) * (1 + 0.1 * self.calls)

    def is_spoiled(self):
        return lamina.rank() == lamina.size() - 1 and (lamina.pp_size() > 1 or hasattr(self.linear.weight, "ds_tensor"))


class Net(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.head = nn.Linear(6, 3)
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


@lamina.step
def train(model, x, target):
    loss = nn.functional.cross_entropy(model(x), target)
    model.backward(loss)
    return loss


@lamina.step
def train_with_penalty(model, x, target):
    loss = nn.functional.cross_entropy(model(x), target)
    model.backward(loss)
    (0.1 * model.module.head.weight.square().sum()).backward()
    return loss


def run(fault="none", at=0, steps=2, recompute=False, step=train, change=None, zero=True, ends_there=False, **keys):
    """Trains, with layer 2 on the second rank, which has the fault from step `at` on; returns losses and the state."""
    lamina.init(**{key: value for key, value in (BY_HAND | keys).items() if value is not None})
    torch.manual_seed(0)
    model = Net(recompute)
    if change is not None:
        change(model)
    if lamina.pp_size() == 2:
        for layer in model.layers[1:3]:
            lamina.set_partition(layer, 1)
        lamina.set_partition(model.head, int(ends_there))
    model = lamina.DistributedModel(model)
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.Generator().manual_seed(1 + lamina.dp_rank())
    losses = []
    for number in range(steps):
        model.module.layers[2].fault = fault if number >= at else "none"
        if zero:
            optimizer.zero_grad()
        x, target = torch.randn(8, 6, generator=batch), torch.randint(3, (8,), generator=batch)
        losses.append(step(model, x, target).reduce_mean().item())
        optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, state


def ended(*args, **keys):
    """Returns what `run` does, without a job."""
    result = run(*args, **keys)
    lamina.shutdown()
    return result


def refused(words, *args, **keys):
    with pytest.raises(UsageError, match=rf"(?s){words}.*\[step-differs\]"):
        run(*args, **keys)
    lamina.shutdown()


def case_a_step_that_is_the_plain_one_goes_on_as_without_a_check():
    for recompute in (False, True):
        losses, state = ended(steps=3, recompute=recompute, deterministic_server=True)
        checked = ended(steps=3, recompute=recompute, deterministic_server=True, verify_steps=2)
        assert checked[0] == losses
        for name, value in state.items():
            torch.testing.assert_close(checked[1][name], value, rtol=0, atol=0)


def case_a_step_that_differs_is_an_error_on_all_ranks_that_names_the_module():
    for fault in FAULTS.keys() - {"none", "of a weight"}:
        refused(r"this step is not that of the plain model.*step 0.*layers\.[12]", fault, verify_steps=1)


def case_the_check_says_what_differs_first():
    refused("output of layers.2 on rank 1 differs", "scaled", verify_steps=1)
    refused("gradient of the output of", "gradient", verify_steps=1)


def case_a_gradient_of_a_parameter_alone_is_compared():
    refused("step 0, microbatch 0: gradient of layers.2.linear.weight on rank 1", "of a weight", verify_steps=1)
    refused(
        "step 0, copy 1, microbatch 0: gradient of layers.2.linear.weight", "of a weight", verify_steps=1, **SHARDED
    )


def case_each_of_the_first_steps_is_compared():
    def change(model):
        for layer in model.layers:
            layer.counts = True

    refused("step 1, microbatch 0: output of layers.2 on rank 1 differs", "scaled", at=1, verify_steps=2)
    ended("scaled", at=1, verify_steps=1)
    ended(steps=3, change=change, active_microbatches=1, verify_steps=3)


def case_shards_of_one_partition_are_compared_on_every_copy():
    ended(steps=3, verify_steps=3, **SHARDED)
    refused("step 1, copy 1, microbatch 0: output of layers.2 on rank 1", "scaled", at=1, verify_steps=2, **SHARDED)


def case_gradients_that_come_from_elsewhere_too_are_no_difference():
    def change(model):
        for layer in model.layers:
            layer.linear.weight.register_hook(lambda gradient: 0.5 * gradient)

    ended(step=train_with_penalty, change=change, zero=False, verify_steps=2, recompute=True)


def case_a_result_that_another_rank_made_has_its_gradient():
    ended(ends_there=True, verify_steps=2)
    refused("gradient of layers.2.linear.weight on rank 1", "of a weight", ends_there=True, verify_steps=1)


def case_after_the_steps_that_are_compared_nothing_is_left_of_it():
    run(verify_steps=1)
    job = current.job()
    gc.collect()
    assert not job.step_check.is_due
    assert not [each for each in gc.get_objects() if type(each) is PlainModel]
    assert not module_call._current.hooked
    assert not job.session.hooked_modules(job.partitioned_model.tree.names)
    assert torch.autograd._engine_run_backward.__module__ != "lamina.torch_patches.backwards"
    lamina.shutdown()
