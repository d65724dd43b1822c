# SPDX-License-Identifier: Apache-2.0
"""Cases of the step in which a model is traced and cut, for two ranks that are one pipeline."""

import copy
import functools
import itertools
import os
import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from multiprocess.steps import train_step
from torch import nn

import lamina
from lamina.calls.remote_call import RemoteCalls
from lamina.modules.tree import ModuleTree

RANK = int(os.environ.get("RANK", 0))
BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Traced(nn.Module):
    """Reads the weight of a child, and calls its children in another order than it has them."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 1)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        for block in reversed(self.blocks):
            x = F.gelu(block(x))
        return self.last(F.linear(self.norm(x), self.blocks[0].weight))


def start(model=None, **keys):
    """A job with a model that is the same each time."""
    lamina.init(**({"partitions": 2, "microbatches": 2, "timeout_s": 30} | keys))
    torch.manual_seed(3)
    return lamina.distribute(model or Traced())


def case_a_body_runs_once_where_the_model_is_cut_and_both_ranks_hear_how():
    model, ran = start(active_microbatches=1), []  # one after the other, as the statistics of the norm need it
    plain = copy.deepcopy(model.get_module())

    @lamina.step
    def train(x):
        ran.append(len(x))
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    loss = train(BATCH).reduce_mean()
    assert ran == [4, 4]
    report = model.partition_report()
    assert lamina.allgather(report, lamina.WORLD) == [report, report]
    assert report["draws"] == report["reads_data"] == report["notes"] == [] and report["predicted_step_us"] > 0
    assert set(report["partition"].values()) == {0, 1}
    assert report["partition"][""] == report["partition"]["blocks.0"], "it reads its weight"
    expected = torch.stack([plain(part).square().mean() for part in BATCH.split(4)]).mean()
    torch.testing.assert_close(loss, expected.detach())
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
    state = {name: value for name, value in plain.state_dict().items() if "running" in name}
    assert all(torch.allclose(value, model.state_dict()[name]) for name, value in state.items())


def case_a_trace_leaves_the_random_numbers_as_they_are():
    states = []
    for skipped in (False, True):
        torch.manual_seed(4)
        model = start(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 1)), skip_tracing=skipped)
        loss = lamina.step(lambda x, model: model(x + torch.rand_like(x)).sum())(BATCH, model).reduce_mean()
        states.append((loss.item(), torch.get_rng_state().tolist()))
        lamina.shutdown()
    assert states[0] == states[1]
    lamina.init(partitions=2)
    assert lamina.allgather(states, lamina.WORLD) == [states, states]


class Schedule:
    """A helper of a model."""

    def __init__(self):
        self.calls = 0


@functools.lru_cache
def mask(rows):
    return torch.ones(rows, rows).tril() / rows


class CountsAndCaches(nn.Module):
    def __init__(self):
        super().__init__()
        self.schedule = Schedule()
        self.layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x):
        self.schedule.calls += 1
        return mask(len(x)) @ self.layers(x) * self.schedule.calls


def case_after_a_trace_counters_and_caches_are_as_before():
    mask.cache_clear()
    torch.manual_seed(3)
    model = start(CountsAndCaches(), microbatches=1)
    plain = copy.deepcopy(model.get_module())
    for _ in range(2):
        loss = train_step(model)(BATCH).reduce_mean()
        torch.testing.assert_close(loss, plain(BATCH).square().mean().detach())


class Scaled(nn.Linear):
    """A layer that reads whatever a script may set on it."""

    of_class = 1.0

    def __init__(self, table):
        super().__init__(6, 6)
        self.scale, self.names, self.table, self.plain = 1.0, ["a"], table, torch.ones(6)

    def forward(self, x):
        x = super().forward(x) * self.scale * self.of_class * self.table["factor"] * self.plain
        return x * len(self.names) * (1 if self.training else 3)


def sets(model):
    """Does to modules what a body may do before it calls the model."""
    for part in model.modules():
        if isinstance(part, Scaled):
            part.scale = 2.0
            part.names = [*part.names[:1], "b"]
            part.table["factor"] = 0.5
            part.plain.fill_(1.5)
            part.bias.requires_grad_(False)
    Scaled.of_class = 1.25
    model.eval()


def case_what_a_body_sets_before_the_cut_reaches_all_ranks():
    torch.manual_seed(3)
    table = {"factor": 1.0}
    module = nn.Sequential(*[Scaled(table) for _ in range(4)])
    plain = copy.deepcopy(module)
    model = start(module, microbatches=1)

    @lamina.step
    def train(x):
        sets(model)
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    loss = train(BATCH).reduce_mean()
    Scaled.of_class = 1.0
    sets(plain)
    expected = plain(BATCH).square().mean()
    torch.testing.assert_close(loss, expected.detach())
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.local_named_parameters():
        assert (parameter.grad is None) == (gradients[name] is None)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name])
    assert len({id(part.table) for part in model.get_module()}) == 1, "one dictionary on each rank, too"


def case_a_body_sets_on_layers_what_their_class_has():
    torch.manual_seed(3)
    module = nn.Sequential(*[Scaled({"factor": 1.0}) for _ in range(4)])
    plain = copy.deepcopy(module)
    model = start(module, microbatches=1)

    def body(network, x):
        for part in network.modules():
            if isinstance(part, Scaled):
                part.of_class = 2.0
        return network(x).square().mean()

    @lamina.step
    def train(x):
        loss = body(model, x)
        model.backward(loss)
        return loss

    for _ in range(2):
        torch.testing.assert_close(train(BATCH).reduce_mean(), body(plain, BATCH).detach())


class Weighted(nn.Linear):
    """Scales what it computes by an array and a number that is drawn."""

    def __init__(self):
        super().__init__(6, 6)
        self.scale, self.draws = np.ones(1), random.Random(3)

    def forward(self, x):
        return super().forward(x) * (self.scale[0] + self.draws.random())


def case_a_body_changes_arrays_and_generators_of_layers():
    torch.manual_seed(3)
    module = nn.Sequential(*[Weighted() for _ in range(4)])
    plain = copy.deepcopy(module)
    model = start(module, microbatches=1)

    def changes(network):
        for part in network.modules():
            if isinstance(part, Weighted):
                part.scale[0] = 2
                part.draws.seed(5)

    @lamina.step
    def train(x):
        changes(model)
        return model(x)

    output = train(BATCH).concat()
    changes(plain)
    torch.testing.assert_close(output, plain(BATCH).detach())


def replaces_a_module(model):
    model.get_module()[3] = nn.Linear(6, 6)


def adds_a_module(model):
    model.get_module().append(nn.Linear(6, 6))


def adds_a_buffer(model):
    model.get_module()[3].register_buffer("more", torch.ones(1))


def replaces_a_parameter(model):
    model.get_module()[3].weight = nn.Parameter(torch.ones(6, 6))


def converts(model):
    model.get_module().double()


def hangs_a_hook(model):
    model.get_module()[3].register_forward_hook(lambda *_: None)


def sets_a_function(model):
    model.get_module()[3].forward = lambda x: x


REFUSED = {
    replaces_a_module: "3",
    adds_a_module: "4.bias",
    adds_a_buffer: "3.more",
    replaces_a_parameter: "3.weight",
    converts: "0.weight",
    hangs_a_hook: "hook of 3",
    sets_a_function: "3.forward",
}


def case_what_cannot_reach_them_is_refused_on_all():
    for change, name in REFUSED.items():
        model = start(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]))

        @lamina.step
        def train(x, change=change, model=model):
            change(model)
            return model(x)

        with pytest.raises(lamina.UsageError, match=f"{name} was changed in a step's body before") as raised:
            train(BATCH)
        assert raised.value.code == "step-before-cut"
        assert lamina.allgather(RANK, lamina.WORLD) == [0, 1]
        lamina.shutdown()


def case_a_body_may_call_a_part_first():
    model = start()
    plain = copy.deepcopy(model.get_module())
    part = model.get_module().blocks[1]
    output = lamina.step(lambda x: model(part(x)))(BATCH).concat()
    torch.testing.assert_close(output, torch.cat([plain(plain.blocks[1](x)) for x in BATCH.split(4)]).detach())
    assert "first" in model.partition_report()["notes"][0]


def case_a_body_may_end_without_a_call_or_fail_before_it():
    for fails in (False, True):
        model = start()

        @lamina.step
        def early(x, fails=fails):
            if fails:
                raise ValueError("early")
            return x * 2

        if fails:
            with pytest.raises(ValueError, match="early"):
                early(BATCH)
        else:
            assert torch.equal(early(BATCH).concat(), BATCH * 2)
        assert model.partitioned and "no call" in model.partition_report()["notes"][0]
        plain = copy.deepcopy(Traced())
        plain.load_state_dict(model.state_dict())
        output = lamina.step(lambda x, model=model: model(x))(BATCH).concat()
        torch.testing.assert_close(output, torch.cat([plain(x) for x in BATCH.split(4)]).detach())
        lamina.shutdown()


def case_ranks_with_other_models_hear_of_it_in_the_step_and_go_on():
    model = start(nn.Sequential(nn.Linear(6, 6 + RANK), nn.Linear(6 + RANK, 1)))
    with pytest.raises(lamina.UsageError, match="built another model than rank 0"):
        lamina.step(lambda x: model(x))(BATCH)
    assert lamina.allgather(RANK, lamina.WORLD) == [0, 1]
    assert not model.partitioned


def case_a_model_that_is_all_on_rank_0_trains_there():
    for make in (lambda: nn.Linear(6, 6), lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))):
        torch.manual_seed(3)
        module = make()
        plain = copy.deepcopy(module)
        lamina.set_partition(module, 0)
        model = start(module)
        for _ in range(2):
            loss = train_step(model)(BATCH).reduce_mean()
            torch.testing.assert_close(loss, plain(BATCH).square().mean().detach())
        assert len(list(model.local_parameters())) == (len(list(plain.parameters())) if RANK == 0 else 0)
        lamina.shutdown()


def case_after_a_cut_that_failed_the_plain_module_can_be_called():
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    module[1].weight = module[0].weight
    for index, part in enumerate(module):
        lamina.set_partition(part, index)
    model = start(module)
    with pytest.raises(lamina.ConfigError, match="share a parameter"):
        train_step(model)(BATCH)
    assert module(BATCH).shape == (8, 6)


def case_a_deterministic_job_is_cut_in_its_first_step():
    found = []
    for _ in range(2):
        model = start(deterministic_server=True)

        @lamina.step
        def train(x, model=model):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        train(BATCH)
        found.append({name: parameter.grad.tolist() for name, parameter in model.local_named_parameters()})
        lamina.shutdown()
    assert found[0] == found[1]
    torch.manual_seed(3)
    plain = Traced()
    for part in BATCH.split(4):
        (plain(part).square().mean() / 2).backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert found[0], "each rank owns something"
    for name, gradient in found[0].items():
        torch.testing.assert_close(torch.tensor(gradient), gradients[name])


def case_the_report_of_a_model_by_hand_and_of_one_partition():
    lamina.init(partitions=2, auto_partition=False, default_partition=1)
    model = lamina.distribute(Traced())
    with pytest.raises(lamina.UsageError, match="no report before"):
        model.partition_report()
    lamina.step(lambda x: model(x))(BATCH)
    assert set(model.partition_report()["partition"].values()) == {1}
    lamina.shutdown()
    lamina.init(partitions=1, ddp=False)
    model = lamina.distribute(Traced())
    names = ModuleTree(model.get_module()).names
    assert model.partition_report()["partition"] == dict.fromkeys(names, 0)


def crossings(model):
    """How often the rank changes between modules that hold no others, in the order in which they are called."""
    owner = model.partition_report()["partition"]
    modules = model.get_module().named_modules()
    owners = [owner[name] for name, module in modules if name in owner and not list(module.children())]
    return sum(one != other for one, other in itertools.pairwise(owners))


def train_beside_plain(model, x):
    """One step of the model, which is then compared with the plain one."""
    plain = copy.deepcopy(model.get_module())
    train_step(model)(x)
    for part in x.split(len(x) // 2):
        (plain(part).square().mean() / 2).backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


def case_a_flat_chain_is_cut_once():
    for traced in (True, False):
        torch.manual_seed(4)
        layers = [[nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), nn.Dropout(0.0)] for _ in range(8)]
        model = start(nn.Sequential(*itertools.chain(*layers), nn.Linear(6, 1)), skip_tracing=not traced)
        train_beside_plain(model, BATCH)
        assert crossings(model) == 1, f"traced: {traced}"
        lamina.shutdown()
    lamina.init(partitions=2)


def case_what_lies_together_in_a_cut_sequential_is_called_at_once():
    torch.manual_seed(4)
    plain = nn.Sequential(*itertools.chain(*([nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)] for _ in range(5))))
    calls, original = [], RemoteCalls.call
    RemoteCalls.call = lambda self, session, number, *rest: (
        calls.append(number) or original(self, session, number, *rest)
    )
    losses, gradients, numbers = [], [], []
    for one_by_one in (False, True):
        lamina.init(partitions=2, microbatches=4, seed=3, auto_partition=False, default_partition=0)
        layers = copy.deepcopy(plain)
        for layer in layers[5:12]:
            lamina.set_partition(layer, 1)
            if one_by_one:
                lamina.set_dynamic(layer)
        model = lamina.distribute(layers)
        losses.append([train_step(model)(BATCH).reduce_mean() for _ in range(3)])
        gradients.append({name: parameter.grad for name, parameter in model.local_named_parameters()})
        numbers.append(len(calls))
        calls.clear()
        lamina.shutdown()
    RemoteCalls.call = original
    assert losses[0] == losses[1]
    torch.testing.assert_close(gradients[0], gradients[1])
    assert numbers == ([3 * 4, 3 * 4 * 7] if RANK == 0 else [0, 0])
    lamina.init(partitions=2)


class OneActivation(nn.Module):
    """Calls one activation, and one dropout, after each layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(8)])
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            x = self.drop(self.act(layer(x)))
        return x


@contextmanager
def counted(name):
    """How often torch.nn.functional's function of that name is called on this rank."""
    calls, original = [], getattr(F, name)
    setattr(F, name, lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    try:
        yield calls
    finally:
        setattr(F, name, original)


def case_one_activation_of_many_layers_runs_where_its_argument_lies():
    losses = []
    for by_hand in (None, (0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 0, 1, 0, 1, 0, 1), (0,) * 8):
        torch.manual_seed(4)
        model = OneActivation()
        for layer, partition in zip(model.layers, by_hand or (), strict=False):
            lamina.set_partition(layer, partition)
        model = start(model)
        train = train_step(model)
        torch.manual_seed(5)
        losses.append(train(BATCH).reduce_mean().item())
        with counted("relu") as calls:
            losses.append(train(BATCH).reduce_mean().item())
        own = sum(model.partition_report()["partition"][f"layers.{i}"] == RANK for i in range(8))
        assert len(calls) == 2 * own, f"{by_hand}: {len(calls)} calls with {own} layers here"
        lamina.shutdown()
    assert losses[:2] == losses[2:4] == losses[4:6] == losses[6:], losses
    lamina.init(partitions=2)
