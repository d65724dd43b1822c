# SPDX-License-Identifier: Apache-2.0
"""Cases for two ranks that are one pipeline: the same bits in every run, and the order of the plain loop. Each begins
without a job."""

import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lamina
from lamina.script_state.counted import reads_counts

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


def build(norm, net=Net):
    torch.manual_seed(0)
    model = net(norm)
    lamina.set_partition(model.second, 1)
    return model


def train(norm, schedule, net=Net):
    """This rank's part of the model, with all its gradients, after some steps."""
    lamina.init(
        partitions=2,
        microbatches=MICROBATCHES,
        schedule=schedule,
        auto_partition=False,
        default_partition=0,
        deterministic_server=True,
        timeout_s=30,
    )
    model = lamina.distribute(build(norm, net))

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


class Counting(nn.Linear):
    """Computes with how often it was called."""

    def __init__(self, norm):
        super().__init__(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Noting(nn.Linear):
    """Counts its calls for others."""

    def __init__(self):
        super().__init__(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class CountingNet(Net):
    def __init__(self, norm):
        super().__init__(norm)
        self.second = Counting(norm)


def case_what_forwards_count_and_read_is_in_the_order_of_microbatches():
    for schedule in ("simple", "interleaved", "zero_bubble"):
        plain = build(nn.LayerNorm, CountingNet)
        state = train(nn.LayerNorm, schedule, CountingNet)
        for call in range(CALLS):
            losses = torch.stack([plain(microbatch).square().mean() for microbatch in BATCH.chunk(MICROBATCHES)])
            assert torch.equal(state[f"loss {call}"], losses.detach())


def case_what_forwards_only_count_costs_no_overlap():
    assert reads_counts(nn.Sequential(Noting(), Counting(nn.LayerNorm)))
    assert not reads_counts(nn.Sequential(Noting(), nn.BatchNorm1d(8)))


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


# Running statistics are those of the plain loop by default, and microbatches overlap.


class Act(nn.BatchNorm1d):
    """A norm with a forward of its own, as vision libraries have."""

    def forward(self, x):
        statistics, parameters = (self.running_mean, self.running_var), (self.weight, self.bias)
        self.num_batches_tracked.add_(int(self.training))
        return F.gelu(F.batch_norm(x, *statistics, *parameters, self.training, self.momentum))


class HandWritten(nn.BatchNorm1d):
    """One that neither counts its calls nor calls torch's function."""

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.running_mean += self.momentum * (x.mean(0) - self.running_mean)
                self.running_var += self.momentum * (x.var(0) - self.running_var)
        return (x - (x.mean(0) if self.training else self.running_mean)) * self.weight


class Norms(nn.Module):
    """Norms of all kinds on both ranks; some are called twice, some recomputed, one by two parents."""

    def __init__(self):
        super().__init__()
        kinds = [
            nn.BatchNorm1d(8),
            nn.BatchNorm1d(8, momentum=None),
            nn.SyncBatchNorm(8),
            Act(8),
            HandWritten(8),
            nn.BatchNorm1d(8, track_running_stats=False),
            nn.BatchNorm1d(8, momentum=0.0),
            nn.BatchNorm1d(8).eval(),
        ]
        self.first = nn.Sequential(nn.Linear(8, 8), *kinds)
        self.second = nn.Sequential(nn.Linear(8, 8), *[type(norm)(8, momentum=norm.momentum) for norm in kinds[:4]])
        self.near = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.far = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.shared = SharedNorm()

    def forward(self, x):
        x = self.second(self.second(self.first(x)))
        x = checkpoint(self.near, x, use_reentrant=False)
        x = checkpoint(self.far, x, use_reentrant=True)
        return self.shared(x)


def norms():
    torch.manual_seed(0)
    return Norms().double()


def distributed_norms(**keys):
    keys = {"partitions": 2, "microbatches": MICROBATCHES, "auto_partition": False, "default_partition": 0} | keys
    lamina.init(timeout_s=60, **keys)
    model = norms()
    for part in (model.second, model.far, model.shared.far):
        lamina.set_partition(part, 1)
    lamina.set_partition(model.shared.far[1], 0)
    return lamina.distribute(model)


def trained(model, evaluate=False):
    @lamina.step
    def step(x):
        loss = model(x).pow(3).mean()
        model.backward(loss)
        if evaluate:
            model.eval()
            model(x)
            model.train()
        return loss

    return step


def assert_states_are_those_of_the_plain_loop(model):
    step, plain = trained(model), norms()
    for _ in range(CALLS):
        step(BATCH.double())
        for microbatch in BATCH.double().chunk(MICROBATCHES):
            plain(microbatch).pow(3).mean().backward()
    state = model.state_dict()
    assert state.keys() == plain.state_dict().keys()
    for name, value in plain.named_buffers():
        assert torch.allclose(state[name].double(), value.double(), rtol=1e-12, atol=1e-12), name


def case_running_statistics_under_interleaved_are_those_of_the_plain_loop():
    assert_states_are_those_of_the_plain_loop(distributed_norms(schedule="interleaved"))


def case_running_statistics_under_simple_are_those_of_the_plain_loop():
    assert_states_are_those_of_the_plain_loop(distributed_norms(schedule="simple"))


def case_running_statistics_of_a_deterministic_server_are_those_of_the_plain_loop():
    assert_states_are_those_of_the_plain_loop(distributed_norms(deterministic_server=True))


def case_a_deterministic_server_overlaps_microbatches_of_a_model_with_batch_norm():
    model = distributed_norms(deterministic_server=True)
    lock, under_way, most = threading.Lock(), 0, 0

    @lamina.step
    def step(x):
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        loss = model(x).square().mean()
        model.backward(loss)
        under_way -= 1
        return loss

    step(BATCH.double())
    step(BATCH.double())
    assert most > 1 or int(os.environ["RANK"]) != 0


def case_an_evaluation_reads_the_running_statistics_and_leaves_them():
    model = distributed_norms()
    step = trained(model)
    step(BATCH.double())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    plain = norms().eval()
    plain.load_state_dict(before)

    @lamina.step
    def evaluate(x):
        with torch.no_grad():
            return model(x)

    expected = torch.cat([plain(microbatch) for microbatch in BATCH.double().chunk(MICROBATCHES)])
    assert torch.allclose(evaluate(BATCH.double()).concat(), expected, rtol=0, atol=1e-10)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def case_an_evaluation_that_would_miss_running_statistics_is_an_error():
    step = trained(distributed_norms(), evaluate=True)
    with pytest.raises(lamina.UsageError, match=r"in training and in evaluation mode in one step.*active_microb"):
        step(BATCH.double())


def case_an_evaluation_of_the_same_step_is_the_plain_loops_where_microbatches_follow_each_other():
    model = distributed_norms(active_microbatches=1)
    trained(model, evaluate=True)(BATCH.double())


def case_a_failed_step_leaves_the_running_statistics():
    model = distributed_norms()
    step = trained(model)
    step(BATCH.double())
    before = {name: value.clone() for name, value in model.local_named_buffers()}

    @lamina.step
    def fails(x):
        model.backward(model(x).mean())
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fails(BATCH.double())
    for name, value in model.local_named_buffers():
        assert torch.equal(value, before[name]), name
