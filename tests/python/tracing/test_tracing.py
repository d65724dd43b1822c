# SPDX-License-Identifier: Apache-2.0
"""Findings of a trace about a model, and that it leaves nothing behind."""

import contextvars
import functools
import gc
import itertools
import random
import sys
import threading
import types
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lamina.errors import UsageError
from lamina.modules.tree import ModuleTree
from lamina.script_state.walk import Reach
from lamina.tracing.costs import CPU
from lamina.tracing.trace import Call, TraceOptions, is_tracing, options_of, summary, trace

X = torch.randn(4, 8)
MEASURED = [TraceOptions(), TraceOptions(memory=True), TraceOptions(times=True)]


def traced(model, *args, options=None, **kwargs):
    """The measures by name, and the trace."""
    tree = ModuleTree(model)
    found = trace(tree, Call(args, kwargs), options or TraceOptions())
    return dict(zip(tree.names, found.measures or [], strict=False)), found


class Busy(nn.Module):
    """Changes whatever a forward can change."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.calls = 0
        self.history = []
        self.seen = {"shapes": []}
        self.memory = torch.zeros(8)

    def forward(self, x, log):
        self.calls += 1
        self.history.append(x)
        self.seen["shapes"].append(x.shape)
        self.last = x
        self.memory.copy_(x[0].detach())
        log.append(random.random())
        x.mul_(2)
        return self.drop(self.linear(self.norm(x)))


class ReadsData(Busy):
    def forward(self, x, log):
        return super().forward(x, log) if x.sum() > -1e9 else x


@pytest.mark.parametrize("kind", [Busy, ReadsData])
@pytest.mark.parametrize("options", MEASURED)
def test_it_leaves_nothing_behind(kind, options):
    model, log, x, called = kind(), [], X.clone(), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: called.append(1))
        module.register_forward_pre_hook(lambda *_: called.append(1))
    model.linear.weight.register_hook(lambda _: called.append(1))
    model.linear.weight.grad = torch.ones(8, 8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [tensor._version for tensor in (*model.parameters(), *model.buffers(), x)]
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    streams = torch.get_rng_state(), random.getstate()

    found, _ = traced(model, x, log, options=options)

    assert found["linear"].forward_us > 0
    assert called == log == model.history == model.seen["shapes"] == [] and model.calls == 0
    assert not model.memory.any() and torch.equal(x, X)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert versions == [tensor._version for tensor in (*model.parameters(), *model.buffers(), x)]
    assert torch.equal(model.linear.weight.grad, torch.ones(8, 8)) and model.linear.bias.grad is None
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == attributes
    assert torch.equal(streams[0], torch.get_rng_state()) and streams[1] == random.getstate()
    assert not is_tracing()


def test_a_forward_that_fails_leaves_nothing_behind_either():
    class Fails(Busy):
        def forward(self, x, log):
            super().forward(x, log)
            raise ValueError("no")

    model, called = Fails(), nn.Module.__call__
    _, found = traced(model, X.clone(), [])
    assert found.measures is None and model.calls == 0 and nn.Module.__call__ is called
    assert "ValueError: no" in found.notes[0] and "by the bytes of its parameters" in found.notes[-1]


class Compares(nn.Module):
    """Fails unless its argument has been halved."""

    def forward(self, x):
        if x.max() > 1:
            raise ValueError("not halved")
        return x


class Differentiates(nn.Module):
    """Uses what hooks on saved tensors are in the way of."""

    def forward(self, x):
        return torch.func.grad(lambda y: (y * y).sum())(x)


def test_an_error_is_the_models_own_where_it_comes_again_without_what_only_a_trace_does():
    hooked = Compares()
    hooked.register_forward_pre_hook(lambda module, args: (args[0] / 2,))
    twos = torch.full((2, 2), 2.0)
    _, found = traced(Compares(), twos)
    assert found.fails and str(found.error) == "not halved"
    for model in (hooked, Differentiates()):
        _, found = traced(model, twos)
        assert found.measures is None and not found.fails
        model(twos)


class Chain(nn.Module):
    """Calls its children in another order than it has them."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 2)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.first = nn.Linear(8, 8)
        self.idle = nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.last(x)


def test_rows_are_in_the_order_of_the_calls():
    tree = ModuleTree(Chain())
    rows, nodes = tree.filled().rows(trace(tree, Call((X,), {}), TraceOptions()).measures)
    assert [row["name"] for row in rows] == ["", "first", "blocks", "blocks.1", "blocks.0", "last", "idle"]
    assert [row["id"] for row in rows] == list(range(7))
    assert [row["parent"] for row in rows] == [-1, 0, 0, 2, 2, 0, 0]
    assert [tree.names[node] for node in nodes] == [row["name"] for row in rows]


def test_costs_are_those_of_the_operations_on_a_nominal_device():
    wide = nn.Sequential(nn.Linear(1000, 2000), nn.Linear(2000, 1000, bias=False))
    wide[1].weight.requires_grad_(False)
    found, _ = traced(wide, torch.zeros(500, 1000))
    flops = 2 * 500 * 1000 * 2000
    assert found["0"].forward_us == CPU.start_us + flops / CPU.flops_per_us
    assert found["0"].backward_us == found["0"].forward_us, "its input needs no gradient"
    assert found["1"].backward_us == found["1"].forward_us, "its weight needs no gradient"
    assert found["0"].output_bytes == 500 * 2000 * 4 and found["0"].calls == 1
    assert found[""].forward_us == 0


def test_weight_parts_are_the_products_for_parameters():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.ReLU())
    found, _ = traced(model, torch.randn(64, 512))
    part = {name: each.stretches[0].weights_us for name, each in found.items() if each.stretches}
    assert part["0"] == found["0"].backward_us, "its input needs no gradient"
    assert part["1"] == found["1"].backward_us / 2
    assert part["2"] == 0


def test_weight_parts_are_all_of_what_only_computes_weights():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(8, 8, bias=False)
            self.scale = nn.Parameter(torch.ones(8, 1))

        def forward(self, x):
            return F.linear(x, self.weight * self.scale)

    found, _ = traced(nn.Sequential(nn.Linear(8, 8), Scaled(), nn.Linear(8, 8, bias=False)), X)
    for_inputs_us = {name: each.backward_us - each.stretches[0].weights_us for name, each in found.items() if name}
    assert found["1"].backward_us > found["2"].backward_us
    assert for_inputs_us["1"] == pytest.approx(for_inputs_us["2"])


class Skips(nn.Module):
    """A value goes past a module, another through one that hands it on, and a third through a view."""

    def __init__(self):
        super().__init__()
        self.first, self.same, self.second = nn.Linear(8, 8), nn.Identity(), nn.Linear(4, 4)

    def forward(self, x):
        skip = self.first(x)
        return self.second(self.same(skip)[:, :4].clone()) + skip[:, 4:]


@pytest.mark.parametrize("options", [TraceOptions(), TraceOptions(memory=True)])
@pytest.mark.parametrize("training", [True, False])
def test_stretches_name_those_whose_values_they_read(options, training):
    with torch.set_grad_enabled(training):
        found, _ = traced(Skips(), X, options=options)
    (first,), (same,), (second,) = (found[name].stretches for name in ("first", "same", "second"))
    own = found[""].stretches
    assert first.reads == {}
    assert same.reads == {first.at: 4 * 8 * 4}, "it only hands its argument on"
    assert own[1].reads == {first.at: 4 * 8 * 4}
    assert second.reads == {own[1].at: 4 * 4 * 4}
    assert own[2].reads == {first.at: 4 * 8 * 4, second.at: 4 * 4 * 4}


def test_a_stretch_reads_what_was_written_from_who_wrote_it_last():
    class Writes(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.writes = nn.Linear(8, 8), Writes()

        def forward(self, x):
            y = self.layer(x)
            self.writes(y)
            return y + y

    found, _ = traced(Adds(), X)
    assert found["writes"].stretches[0].reads == {found["layer"].stretches[0].at: 4 * 8 * 4}
    assert found[""].stretches[-1].reads == {found["writes"].stretches[0].at: 4 * 8 * 4}


def test_attention_counts():
    class Attends(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    q = torch.zeros(8, 8, 512, 64, requires_grad=True)
    found, _ = traced(Attends(), q, q, q)
    assert found[""].forward_us > 2 * 2 * 8 * 8 * 512 * 512 * 64 / CPU.flops_per_us
    assert found[""].backward_us > 2 * found[""].forward_us and not found[""].draws


@pytest.mark.parametrize("options", MEASURED[:2])
def test_activations_are_what_is_kept_once_and_no_parameters(options):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.other = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x).exp() + self.other(x)

    found, _ = traced(Keeps(), X, options=options)
    assert found["linear"].activation_bytes == X.nbytes
    assert found["other"].activation_bytes == 0, "the same memory"
    assert found[""].activation_bytes == X.nbytes, "the result of exp"


class Reads(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.gain = nn.Parameter(torch.ones(8))
        self.read = read

    def forward(self, x):
        return self.inner(self.norm(self.read(self, x)))


class Given(nn.Module):
    def forward(self, x):
        return x + 1


class Gives(nn.Module):
    def __init__(self):
        super().__init__()
        self.vector = nn.Parameter(torch.ones(8))

    def forward(self):
        return self.vector


@pytest.mark.parametrize(
    "read, nodes",
    [
        (lambda model, x: F.linear(x, model.inner.weight), {"inner"}),
        (lambda model, x: x + model.norm.running_mean, {"norm"}),
        (lambda model, x: x.to(model.inner.weight.dtype) * model.inner.weight.shape[0], set()),
        (lambda model, x: x * model.gain, set()),
        (lambda model, x: x, set()),
    ],
    ids=["weight", "buffer", "metadata", "its own", "nothing"],
)
@pytest.mark.parametrize("options", MEASURED[:2])
def test_what_a_module_reads_of_another(read, nodes, options):
    tree = ModuleTree(Reads(read))
    found = trace(tree, Call((X,), {}), options)
    assert {tree.names[node] for node in found.measures[0].reads} == nodes
    rows, _ = tree.filled().rows(found.measures)
    assert {rows[other]["name"] for other in rows[0]["together"]} == nodes


def test_a_parameter_that_is_given_is_a_value():
    class Passes(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(8))
            self.given, self.gives = Given(), Gives()

        def forward(self):
            return self.given(self.gain) + self.gives()

    found, _ = traced(Passes())
    assert not any(each.reads for each in found.values())


def test_a_model_that_reads_data_is_run_once_and_the_module_named(capsys):
    class Inner(nn.Module):
        def forward(self, x):
            print(type(x).__name__)
            return x * 2 if x.sum().item() > 0 else x

    model = nn.Sequential(nn.Linear(8, 8), Inner(), nn.Dropout(0.5))
    tree = ModuleTree(model)
    found = trace(tree, Call((X,), {}), TraceOptions())
    nothing = {"slices": [], "exchange_us": {}, "ties": {}, "notes": []}
    assert summary(tree, found) == {"reads_data": ["1"], "draws": ["2"], **nothing}
    assert found.measures[0].forward_us + found.measures[1].forward_us > 0
    assert capsys.readouterr().out.split()[1:] == ["Tensor"], "after the fake one"


def test_a_model_that_reads_data_and_runs_a_backward_in_its_forward_is_traced():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            (gradient,) = torch.autograd.grad(y.square().sum(), self.linear.weight, retain_graph=True)
            return y * 2 if gradient.sum().item() > 0 else y

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return F.linear(self.inner(x), self.inner.linear.weight)

    found, whole = traced(Model(), X)
    assert whole.notes == []
    assert found[""].reads == {2} and found["inner"].reads_data


def test_a_forward_that_writes_its_parameters_is_not_run():
    class Clamps(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(max=0.5 if x.sum() > -1e9 else 1)
            return x * self.weight

    model = Clamps()
    _, found = traced(model, X)
    assert found.measures is None and "writes to a parameter" in found.notes[1]
    assert torch.equal(model.weight, torch.ones(8))


def test_autocast_of_the_caller_holds_and_its_cache_stays_empty():
    model = nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = traced(model, X)
        assert found[""].output_bytes == 4 * 8 * 2
        with torch.no_grad():
            model.weight.zero_()
        assert torch.equal(model(X)[0], model.bias.to(torch.bfloat16)), "of the weight as it is now"


def test_without_grad_of_the_caller_the_backward_counts_too():
    with torch.no_grad():
        found, _ = traced(nn.Linear(8, 8), X)
    assert found[""].backward_us > 0


class Clock:
    """Time that passes only where somebody says so."""

    def __init__(self):
        self.now = 0.0

    def now_us(self):
        return self.now * 1e6


def test_times_are_each_modules_own(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("lamina.tracing.times.OwnClock", lambda: clock)

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, forward_s, backward_s):
            clock.now += forward_s
            ctx.backward_s = backward_s
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            clock.now += ctx.backward_s
            return gradient, None, None

    class Slow(nn.Module):
        def __init__(self, forward_s, backward_s, *children):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.inner = nn.ModuleList(children)
            self.costs = forward_s, backward_s

        def forward(self, x):
            x = Work.apply(x * self.scale, *self.costs)
            for child in self.inner:
                x = child(x)
            return Work.apply(x, *self.costs)

    model = Slow(1, 2, Slow(10, 20), Slow(100, 300))
    found, _ = traced(model, X, options=TraceOptions(times=True))
    times = {name: (each.forward_us / 1e6, each.backward_us / 1e6) for name, each in found.items() if each.calls}
    assert {name: (round(f), round(b)) for name, (f, b) in times.items()} == {
        "": (2, 4),
        "inner.0": (20, 40),
        "inner.1": (200, 600),
    }


def test_times_of_the_host_where_another_device_trains_are_refused(monkeypatch):
    monkeypatch.setattr("lamina.tracing.trace.device", lambda: torch.device("cuda:3"))
    assert options_of("gpu", True, False).device == torch.device("cuda:3")
    assert options_of("cpu", False, True) == TraceOptions(torch.device("cpu"), memory=True)
    with pytest.raises(UsageError, match='leave trace_device at "gpu"'):
        options_of("cpu", True, False)


def test_recurrent_and_old_style_modules_are_traced_without_a_run():
    for model, x in [
        (nn.LSTM(8, 8), torch.randn(3, 2, 8)),
        (nn.MultiheadAttention(8, 2), None),
        (nn.TransformerEncoderLayer(8, 2, 16), torch.randn(3, 2, 8)),
        (nn.utils.weight_norm(nn.Linear(8, 8)), X),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), X),
        (nn.utils.spectral_norm(nn.Linear(8, 8)), X),
    ]:
        args = (torch.randn(3, 2, 8),) * 3 if x is None else (x,)
        found, whole = traced(model, *args)
        assert found[""].forward_us > 0 and found[""].backward_us > 0 and whole.notes == [], type(model)
        assert model(*args) is not None and all(type(p) is nn.Parameter for p in model.parameters())


class Experts(nn.Module):
    """torch knows its operation for bfloat16 alone where nothing is computed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8, 8))

    def forward(self, x):
        return torch._grouped_mm(x, self.weight, offs=torch.tensor([4, 8], dtype=torch.int32))


def test_what_only_runs_with_values_is_run_and_torch_writes_no_traceback(caplog, capfd):
    tree = ModuleTree(nn.Sequential(Experts(), nn.Linear(8, 8)))
    found = trace(tree, Call((torch.ones(8, 8),), {}), TraceOptions())
    assert found.notes == [] and found.measures[1].forward_us > 0
    assert caplog.text == capfd.readouterr().err == ""


class Register:
    """An object of the script's own, with a slot, that a forward changes."""

    __slots__ = ("__dict__", "last")
    of_class = 0

    def __init__(self):
        self.calls, self.table, self.numbers = 0, {}, itertools.count()
        self.deep = types.SimpleNamespace(each=[torch.zeros(2), {"seen": set()}])
        self.generator, self.python, self.array = torch.Generator(), random.Random(1), np.zeros(2)


REGISTER, TABLES, local = Register(), {}, threading.local()
VARIABLE = contextvars.ContextVar("variable", default=0)


@functools.lru_cache
def bounded(rows):
    return torch.ones(rows, rows), "and more"


@functools.cache
def unbounded(rows):
    return torch.ones(rows, rows)


def counted(x, seen=[]):  # noqa: B006
    seen.append(x)
    counted.calls = getattr(counted, "calls", 0) + 1
    return len(seen)


def of_closure():
    calls, kept = 0, None

    def count(x):
        nonlocal calls, kept
        calls, kept = calls + 1, x
        return calls

    return count


count_in_closure = of_closure()


class LeavesThings(nn.Linear):
    tables: ClassVar = {}

    def __init__(self, register, reads):
        super().__init__(8, 8)
        self.register, self.reads = register, reads

    @functools.cached_property
    def halves(self):
        return torch.full((8,), 0.5)

    def forward(self, x):
        global made_in_forward
        for each in (self.register, REGISTER):
            each.calls, each.last, each.number = each.calls + 1, x, next(each.numbers)
            each.table[len(x)] = x
            each.deep.each[1]["seen"].add(each.calls)
            each.deep.each[0].add_(torch.rand(2, generator=each.generator))
            each.array[0] += each.python.random()
        Register.of_class += 1
        type(self).tables[len(x)] = made_in_forward = TABLES["x"] = x
        local.x, local.calls = x, getattr(local, "calls", 0) + 1
        VARIABLE.set(VARIABLE.get() + 1)
        counted(x), count_in_closure(x)
        x = bounded(8)[0] @ unbounded(8) @ super().forward(x).T
        x = x.T * self.halves
        return x if not self.reads or x.sum().item() > 0 else -x


def things_of(register):
    return [
        *(getattr(register, name, None) for name in ("calls", "last", "number")),
        dict(register.table),
        repr(register.numbers),
        repr(register.deep),
        register.generator.get_state().tolist(),
        register.python.getstate(),
        register.array.tolist(),
    ]


def things_left(register):
    """Everything that `LeavesThings` changes."""
    found = [*things_of(register), *things_of(REGISTER), Register.of_class, dict(LeavesThings.tables), dict(TABLES)]
    found += [globals().get("made_in_forward"), dict(vars(local)), VARIABLE.get(), count_in_closure.__closure__[0]]
    found += [dict(vars(counted)), list(counted.__defaults__[0]), count_in_closure.__closure__[1].cell_contents]
    return [*found, bounded.cache_info().currsize, unbounded.cache_info().currsize]


@pytest.mark.parametrize("reads", [False, True])
def test_whatever_a_forward_can_reach_is_as_before(reads, capfd):
    register, kept = Register(), unbounded(3)
    model = nn.Sequential(LeavesThings(register, reads), LeavesThings(register, False))
    before = things_left(register)
    _, found = traced(model, X)
    assert found.measures is not None
    assert str(things_left(register)) == str(before) and unbounded(3) is kept
    assert not any("halves" in vars(part) for part in model)
    assert capfd.readouterr().err == ""


HIDDEN = types.ModuleType("hidden")  # no code has the names of what is in it
HIDDEN.table = {}


class Hides(nn.Module):
    def forward(self, x):
        getattr(sys.modules["hidden"], "tab" + "le")["x"] = x, [x]
        return x


def test_a_cache_that_nobody_sees_forgets_what_the_trace_put_into_it(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "hidden", HIDDEN)
    traced(Hides(), X)
    assert HIDDEN.table == {} and capfd.readouterr().err == ""
    monkeypatch.setattr(Hides, "forward", lambda self, x: setattr(sys.modules["hidden"], "tab" + "le", x))
    traced(Hides(), X)
    assert "hidden.table" in capfd.readouterr().err
    HIDDEN.table = {}


def test_a_graph_of_a_trace_is_let_go():
    before = {id(each) for each in gc.get_objects() if type(each) is FakeTensor}  # of other tests
    traced(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), X)
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is FakeTensor and id(each) not in before]


def test_a_generator_that_has_no_state_is_left_alone():
    reach = Reach([("it", {"draw": random.SystemRandom()})])
    reach.restore()
    assert not reach.sources
