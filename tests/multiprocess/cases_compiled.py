# SPDX-License-Identifier: Apache-2.0
"""Cases of torch.compile for two ranks that are one pipeline."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import lamina

BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)

    def forward(self, x):
        return self.outer(F.gelu(self.inner(x))) + x


def trains(make, loss_of=lambda y: y.square().mean(), steps_that_compile=1):
    """`make(blocks)` compiles, or places, some of three blocks, of which the first is on rank 1. What is
    compiled is compiled in the first steps only."""
    lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0)
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    lamina.set_partition(blocks[0], 1)
    plain = copy.deepcopy(nn.Sequential(*blocks))
    make(blocks)
    model = lamina.distribute(nn.Sequential(*blocks))

    @lamina.step
    def step(x):
        loss = loss_of(model(x))
        model.backward(loss)
        return loss

    expected = plain(BATCH).square().mean()
    expected.backward()
    compiled = []
    for _ in range(5):
        model.zero_grad()
        assert torch.allclose(step(BATCH).reduce_mean(), expected)
        compiled.append(torch._dynamo.utils.counters["frames"]["total"])
    assert compiled[-1] == compiled[steps_that_compile - 1]
    for name, parameter in model.local_named_parameters():
        assert torch.allclose(parameter.grad, plain.get_parameter(name).grad, atol=1e-6), name


def case_a_compiled_child_gets_what_another_rank_returned():
    def make(blocks):
        blocks[1] = torch.compile(blocks[1], backend="eager")

    trains(make)


def case_a_compiled_model_has_the_names_of_the_plain_one_and_loads_both_ways():
    lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0)
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    plain = copy.deepcopy(nn.Sequential(*blocks))
    lamina.set_partition(blocks[0], 1)
    blocks[1] = torch.compile(blocks[1], backend="eager")
    compiled = torch.compile(nn.Sequential(*blocks), backend="eager")
    states = copy.deepcopy([compiled.state_dict(), nn.Sequential(*blocks).state_dict(), plain.state_dict()])
    model = lamina.distribute(compiled)

    @lamina.step
    def step(x):
        return model(x)

    for more, state in enumerate(states):
        model.load_state_dict({name: value + more for name, value in state.items()})
        plain.load_state_dict(model.state_dict())
        assert torch.allclose(step(BATCH).concat(), plain(BATCH))
        assert all(torch.equal(plain.state_dict()[name], value + more) for name, value in states[-1].items())


def case_a_child_that_is_compiled_in_place_gets_what_another_rank_returned():
    trains(lambda blocks: blocks[1].compile(backend="eager"))


def case_a_compiled_module_calls_a_child_of_another_rank():
    def make(blocks):
        lamina.set_partition(blocks[1].inner, 1)
        blocks[1] = torch.compile(blocks[1], backend="eager")

    trains(make)


def case_a_compiled_module_of_another_rank_is_called():
    trains(lambda blocks: blocks[0].compile(backend="eager"))


def case_a_compiled_function_gets_what_another_rank_returned():
    def make(blocks):
        lamina.set_partition(blocks[2], 1)

    trains(make, torch.compile(lambda y: y.square().mean(), backend="eager"))


def case_a_compiled_function_closes_over_what_another_rank_returned():
    def make(blocks):
        lamina.set_partition(blocks[2], 1)

    def loss_of(y):
        return torch.compile(lambda: y.square().mean(), backend="eager")()

    trains(make, loss_of, steps_that_compile=5)
