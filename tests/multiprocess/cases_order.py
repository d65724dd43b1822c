# SPDX-License-Identifier: Apache-2.0
"""Cases for two ranks that are one pipeline: the same bits in every run. Each begins without a job."""

import torch
from torch import nn

import lamina

MICROBATCHES, CALLS = 6, 3
BATCH = torch.randn(4 * MICROBATCHES, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Two halves, of which the second is called twice; statistics of both depend on the order of the calls."""

    def __init__(self, norm):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), norm(8), nn.GELU())
        self.second = nn.Sequential(nn.Linear(8, 8), norm(8), nn.GELU())

    def forward(self, x):
        return self.second(self.second(self.first(x)))


def build(norm):
    torch.manual_seed(0)
    model = Net(norm)
    lamina.set_partition(model.second, 1)
    return model


def train(norm, schedule):
    """All that this rank has of the model, and all its gradients, after some steps."""
    lamina.init(
        partitions=2,
        microbatches=MICROBATCHES,
        schedule=schedule,
        auto_partition=False,
        default_partition=0,
        deterministic_server=True,
        timeout_s=30,
    )
    model = lamina.distribute(build(norm))

    @lamina.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = [step(BATCH).stack() for _ in range(CALLS)]
    state = {name: value.detach().clone() for name, value in model.local_named_parameters()}
    state |= {f"gradient of {name}": value.grad.clone() for name, value in model.local_named_parameters()}
    state |= {name: value.clone() for name, value in model.local_named_buffers()}
    state |= {f"loss {at}": loss for at, loss in enumerate(losses)}
    lamina.shutdown()
    return state


def assert_two_runs_are_alike(norm, schedule):
    first, second = train(norm, schedule), train(norm, schedule)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    return first


def assert_statistics_are_those_of_the_plain_loop(state):
    plain = build(nn.BatchNorm1d)
    for _ in range(CALLS):
        for microbatch in BATCH.chunk(MICROBATCHES):
            plain(microbatch)
    buffers = {name: value for name, value in plain.named_buffers() if name in state}
    assert len(buffers) == 3
    for name, value in buffers.items():
        assert torch.allclose(state[name], value, rtol=0, atol=1e-6), name


def case_two_runs_with_batch_norm_under_simple_have_the_same_bits_and_the_statistics_of_the_plain_loop():
    assert_statistics_are_those_of_the_plain_loop(assert_two_runs_are_alike(nn.BatchNorm1d, "simple"))


def case_two_runs_with_batch_norm_under_interleaved_have_the_same_bits_and_the_statistics_of_the_plain_loop():
    assert_statistics_are_those_of_the_plain_loop(assert_two_runs_are_alike(nn.BatchNorm1d, "interleaved"))


def case_two_runs_without_buffers_under_simple_have_the_same_bits():
    assert_two_runs_are_alike(nn.LayerNorm, "simple")


def case_two_runs_without_buffers_under_interleaved_have_the_same_bits():
    assert_two_runs_are_alike(nn.LayerNorm, "interleaved")


def case_gradients_are_those_of_the_plain_loop():
    plain = build(nn.LayerNorm)
    state = train(nn.LayerNorm, "interleaved")
    for _ in range(CALLS):
        for microbatch in BATCH.chunk(MICROBATCHES):
            (plain(microbatch).square().mean() / MICROBATCHES).backward()
    for name, value in plain.named_parameters():
        if name in state:
            assert torch.allclose(state[f"gradient of {name}"], value.grad, atol=1e-6), name


class SharedNorm(nn.Module):
    """Two branches, neither of which needs the other, with one norm."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(8)
        self.far = nn.Sequential(nn.Linear(8, 8), norm)
        self.near = nn.Sequential(nn.Linear(8, 8), norm)

    def forward(self, x):
        return self.far(x) + self.near(x)


def case_statistics_that_two_parents_share_see_the_calls_in_the_order_of_the_program():
    lamina.init(partitions=2, microbatches=1, auto_partition=False, default_partition=0, timeout_s=30)
    torch.manual_seed(0)
    model, plain = SharedNorm(), SharedNorm()
    plain.load_state_dict(model.state_dict())
    lamina.set_partition(model.far, 1)
    lamina.set_partition(model.far[1], 0)
    model = lamina.distribute(model)

    @lamina.step
    def step(x):
        return model(x)

    for _ in range(6):
        step(BATCH)
        plain(BATCH)
    for name, value in model.local_named_buffers():
        assert torch.allclose(value, plain.get_buffer(name)), name
