# SPDX-License-Identifier: Apache-2.0
"""Models in segments of operations, over two ranks."""

import copy
import os

import pytest
import torch
from equivalence.split_models import Random, models
from torch import nn
from torch.utils import _pytree as pytree

import lamina
from lamina.errors import UsageError

RANK = int(os.environ.get("RANK", 0))
MICROBATCHES = 4


def start(**keys):
    lamina.init(**({"partitions": 2, "microbatches": MICROBATCHES, "timeout_s": 60} | keys))


def weighted(outputs):
    made = [each for each in pytree.tree_leaves(outputs) if isinstance(each, torch.Tensor)]
    return sum((each * torch.linspace(0, 1, each.numel()).view_as(each)).sum() for each in made)


def require_trained_alike(model, microbatch):
    """Three steps of both, of batches of as many microbatches as there are."""
    plain = copy.deepcopy(model)
    split = lamina.split_graph(model, *microbatch)
    partitions = {int(segment.__dict__["_lamina_placed"]) for segment in split.children()}
    assert partitions == {0, 1}
    distributed = lamina.distribute(split)
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(distributed.parameters(), lr=0.01, momentum=0.9))
    usual = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)

    @lamina.step
    def train_step(*inputs):
        loss = weighted(distributed(*inputs))
        distributed.backward(loss)
        return loss

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted = dict(plain.named_parameters())
    for _ in range(3):
        loss = train_step(*(torch.cat([each] * MICROBATCHES) for each in microbatch)).reduce_mean()
        for _ in range(MICROBATCHES):
            same = weighted(plain(*microbatch)) / MICROBATCHES
            same.backward()
        torch.testing.assert_close(loss, same.detach() * MICROBATCHES, rtol=0, atol=1e-12)
        own = 0
        for parameter in distributed.local_parameters():
            gradient = wanted[names[id(parameter)]].grad
            assert (parameter.grad is None) == (gradient is None)
            if gradient is not None:
                torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)
                own += 1
        trained = sum(parameter.grad is not None for parameter in plain.parameters())
        assert sum(lamina.allgather(own, lamina.PP_GROUP)) == trained > 0
        for each in (optimizer, usual):
            each.step()
            each.zero_grad()


def case_convolutions_in_segments_train_as_the_model_does():
    start()
    make, inputs = models()["convolutions"]
    require_trained_alike(make().double(), inputs)


def case_a_transformer_in_segments_trains_as_the_model_does():
    start()
    make, inputs = models()["transformer"]
    require_trained_alike(make().double(), inputs)


def case_skips_in_segments_train_as_the_model_does():
    start(schedule="simple")
    make, inputs = models()["skips"]
    require_trained_alike(make().double(), inputs)


def case_random_graphs_in_segments_train_as_the_model_does():
    for seed in (1, 4, 6):
        start()
        torch.manual_seed(seed)
        require_trained_alike(Random(seed).double(), (torch.randn(2, 6, dtype=torch.float64),))
        lamina.shutdown()


def case_a_model_is_split_where_lamina_plans():
    start(auto_partition=False, default_partition=0)
    with pytest.raises(UsageError, match="takes auto_partition, which is off"):
        lamina.split_graph(nn.Linear(3, 3), torch.zeros(2, 3))
