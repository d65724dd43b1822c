# SPDX-License-Identifier: Apache-2.0
"""Cases of state that modules share, and of what one microbatch does while another one waits, for two ranks that are
one pipeline."""

import contextvars
import copy
import itertools
import random
import threading
import types
import typing

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from multiprocess.steps import train_step
from torch import nn

import lamina

BATCH = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BY_HAND = {"auto_partition": False, "default_partition": 0}


def distributed(module, there=(), here=(), **keys):
    """The model of a job with two ranks, with what is named on the second, or on the first; and a copy of it."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data.uniform_(-0.5, 0.5)
    lamina.init(**({"partitions": 2, "microbatches": 2, "timeout_s": 30} | keys))
    module = module.double()
    plain = copy.deepcopy(module)
    for names, partition in ((here, 0), (there, 1)):
        for name in names:
            lamina.set_partition(module.get_submodule(name), partition)
    return lamina.distribute(module), plain


def linear():
    return nn.Linear(6, 6)


class Assigns(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.child = nn.Identity()

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class WritesInPlace(Assigns):
    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


class CallsBefore(Assigns):
    """Updates its buffer with what a child returns."""

    def __init__(self):
        super().__init__()
        self.child = linear()

    def forward(self, x):
        y = self.child(x)
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - self.mean


class CallsBetween(CallsBefore):
    def forward(self, x):
        old = self.mean
        y = self.child(x)
        self.mean = 0.9 * old + 0.1 * y.detach().mean(0)
        return y - self.mean


class KeepsATensor(Assigns):
    """Its mean is no buffer."""

    def __init__(self):
        super().__init__()
        del self.mean
        self.mean = torch.zeros(6, dtype=torch.float64)


def possible_means(plain, steps):
    """Gives all that the mean may be after so many steps, if microbatches come one after the other."""
    for orders in itertools.product([(0, 1), (1, 0)], repeat=steps):
        one = copy.deepcopy(plain)
        for number in itertools.chain(*orders):
            one(BATCH.chunk(2)[number])
        yield one[2].mean


def case_a_forward_that_updates_state_is_whole_whatever_it_waits_for():
    ways = [(kind, {}) for kind in (Assigns, WritesInPlace, KeepsATensor, CallsBetween, CallsBefore)]
    ways += [(kind, BY_HAND) for kind in (Assigns, WritesInPlace, KeepsATensor, CallsBefore)]
    for kind, keys in ways:
        calls = "2.child" if kind is CallsBefore else "1"
        model, plain = distributed(nn.Sequential(linear(), linear(), kind(), linear()), [calls], ["2"], **keys)
        step = train_step(model)
        for _ in range(3):
            step(BATCH)
        state = model.state_dict()
        if lamina.rank() == 0:
            found = state.get("2.mean", model.module[2].mean)
            assert any(torch.allclose(found, mean) for mean in possible_means(plain, 3)), (kind, keys)
        lamina.shutdown()


def case_an_update_that_waits_between_its_halves_is_an_error_where_nobody_saw_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.child, self.mean = linear(), 0.0

        def forward(self, x):
            self.mean = 0.9 * self.mean + self.child(x).mean().item()
            return x * self.mean

    model, _ = distributed(Net(), ["child"], **BY_HAND)
    step = lamina.step(lambda x: model(x))
    with pytest.raises(lamina.UsageError, match=r"mean' of the model was set by another microbatch between"):
        for _ in range(50):  # in most steps: whether the other one runs in between is a matter of arrival
            step(BATCH)


class Scales(nn.Module):
    """Keeps a number over calls of its layers, and counts them."""

    def __init__(self):
        super().__init__()
        self.scale, self.calls, self.last = 1.0, 0, 0
        self.layers = nn.ModuleList([linear() for _ in range(4)])

    def forward(self, x):
        self.scale = float(x.abs().max())
        for layer in self.layers:
            x = layer(x)
            self.calls += 1
            self.last = self.calls
        return x * self.scale


def case_a_number_in_an_attribute_is_its_microbatchs_and_counters_count():
    model, plain = distributed(Scales(), ["layers.1", "layers.3"], microbatches=4)
    step = lamina.step(lambda x: model(x))
    for _ in range(2):
        torch.testing.assert_close(step(BATCH).concat(), torch.cat([plain(x) for x in BATCH.chunk(4)]).detach())
    if lamina.rank() == 0:
        assert model.module.calls == plain.calls == 32


class Held(Scales):
    """Keeps its number in an object."""

    def __init__(self, held):
        super().__init__()
        self.held, self.counts = held, {"calls": 0}

    def forward(self, x):
        self.put(x.abs().max().item())
        for layer in self.layers:
            self.counts["calls"] += 1
            x = layer(x)
        return x * self.get()

    def put(self, value):
        self.held.scale = value

    def get(self):
        return self.held.scale


class HeldInADictionary(Held):
    def put(self, value):
        self.held["scale"] = value

    def get(self):
        return self.held["scale"]


GLOBAL = {"scale": 1.0, "calls": 0}


class HeldGlobally(Scales):
    def forward(self, x):
        GLOBAL["scale"] = x.abs().max().item()
        for layer in self.layers:
            GLOBAL["calls"] += 1
            x = layer(x)
        return x * GLOBAL["scale"]


class State:
    def __init__(self):
        self.scale = 1.0

    def put(self, value):
        self.scale = value


class HeldByAMethod(Held):
    def put(self, value):
        self.held.put(value)


def case_a_number_in_an_object_is_its_microbatchs_and_counters_count():
    made = (Held(types.SimpleNamespace(scale=1.0)), HeldInADictionary({"scale": 1.0}), HeldByAMethod(State()))
    for module in made:
        model, plain = distributed(module, ["layers.1", "layers.3"], ["layers.0", "layers.2"], microbatches=4)
        step = lamina.step(lambda x, model=model: model(x))
        for _ in range(2):
            torch.testing.assert_close(step(BATCH).concat(), torch.cat([plain(x) for x in BATCH.chunk(4)]).detach())
        if lamina.rank() == 0:
            assert model.module.counts == plain.counts == {"calls": 32}
        lamina.shutdown()


def case_a_global_number_that_another_microbatch_replaces_is_an_error():
    model, _ = distributed(HeldGlobally(), ["layers.1", "layers.3"], microbatches=4)
    step = lamina.step(lambda x: model(x))
    with pytest.raises(lamina.UsageError, match=r"GLOBAL is changed by several"):
        for _ in range(2):
            step(BATCH)


class Slots:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Temperature:
    """Is called, and goes on with each call."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return 1 + self.calls / 10


ADDED = {}
AGAIN = {}
LEVEL = torch.ones(1, dtype=torch.float64)
KEPT = threading.local()
DRAWN = random.Random(0)


class Layer(nn.Linear):
    """Reads what its parent, or another layer, has left in what they share."""

    def __init__(self, shared, use):
        super().__init__(6, 6)
        self.shared, self.use = shared, use

    def forward(self, x):
        return self.use(self.shared, torch.tanh(super().forward(x)))


class Net(nn.Module):
    def __init__(self, shared, use, begin, end=lambda shared, x: x):
        super().__init__()
        self.shared, self.begin, self.end = shared, begin, end
        self.layers = nn.ModuleList([Layer(shared, use) for _ in range(4)])
        self.last = linear()

    def forward(self, x):
        self.begin(self.shared)
        for layer in self.layers:
            x = layer(x)
        return self.end(self.shared, self.last(x))


def add(_, x):
    ADDED[len(ADDED)] = x.square().mean()
    return x


def pass_on(_, x):
    before = AGAIN.get("x", 0)
    AGAIN["x"] = x
    return x + before


def keep(_, x):
    KEPT.sum = getattr(KEPT, "sum", 0) + x.square().mean()
    return x


def read_registry(_, x):
    Registry.found.append(x.square().mean())
    return x


class Registry:
    found: typing.ClassVar = []
    level = 1.0


def through_a_function():
    return HELD


HELD = Slots()


def count(_, x):
    Registry.level += 1
    return x * (Registry.level % 3)


def scaled(_, x):
    scaled.calls += 1
    return x * (scaled.calls % 3)


scaled.calls = 0


class Counts:
    total = 0

    @classmethod
    def count(cls):
        Counts.total += 1
        return Counts.total


class Keeper:
    """Has a global number in its methods."""

    def put(self, value):
        Registry.level = value

    def scaled(self, x):
        return x * (Registry.level % 3)


class Named(Slots):
    """Is one object, as its name is, in a model and its copies."""

    def __deepcopy__(self, memo):
        return self


NAMED = Named()
TAKEN = itertools.cycle([1.0, 2.0, 3.0, 4.0])  # one for each layer


SHARED = {
    "what methods of an object share": (
        Keeper,
        lambda held, x: held.scaled(x),
        lambda held: held.put(5.0),
    ),
    "what has another name": (lambda: NAMED, lambda held, x: x * held.scale, lambda _: setattr(NAMED, "scale", 3.0)),
    "an iterator": (lambda: None, lambda _, x: x * next(TAKEN), lambda _: None),
    "a function's number": (lambda: None, scaled, lambda _: setattr(scaled, "calls", 0)),
    "what a classmethod counts": (
        lambda: None,
        lambda _, x: x * (Counts.count() % 3),
        lambda _: setattr(Counts, "total", 0),
    ),
    "a class's list": (
        lambda: None,
        read_registry,
        lambda _: Registry.found.clear(),
        lambda _, x: x + sum(Registry.found),
    ),
    "a class's number": (lambda: None, count, lambda _: setattr(Registry, "level", 1.0)),
    "what a function returns": (
        lambda: None,
        lambda _, x: x * through_a_function().scale,
        lambda _: setattr(through_a_function(), "scale", 2.0),
    ),
    "a tensor": (lambda: torch.ones(1), lambda level, x: x * level, lambda level: level.fill_(2.0)),
    "a part of a tensor": (lambda: torch.ones(2), lambda level, x: x * level[1], lambda level: level[1:].mul_(3)),
    "an array": (lambda: np.ones(2), lambda level, x: x * level[0], lambda level: level.fill(2.0)),
    "slots": (Slots, lambda held, x: x * held.scale, lambda held: setattr(held, "scale", 3.0)),
    "what is called": (Temperature, lambda held, x: x * held(), lambda held: setattr(held, "calls", 2)),
    "a tensor in a dictionary": (
        lambda: {"level": torch.ones(1)},
        lambda held, x: x * held["level"],
        lambda held: held["level"].fill_(2.0),
    ),
    "Python's generator": (lambda: random.Random(0), lambda held, x: x * held.random(), lambda held: held.seed(3)),
    "torch's generator": (
        lambda: torch.Generator(),
        lambda held, x: x * torch.rand(1, generator=held, dtype=x.dtype),
        lambda held: held.manual_seed(3),
    ),
    "a global tensor": (lambda: None, lambda _, x: x * LEVEL, lambda _: LEVEL.fill_(2.0)),
    "a global generator": (lambda: None, lambda _, x: x * DRAWN.random(), lambda _: DRAWN.seed(3)),
    "new keys": (lambda: None, add, lambda _: ADDED.clear(), lambda _, x: x + sum(ADDED.values())),
    "one key": (lambda: None, pass_on, lambda _: AGAIN.clear()),
    "a thread's own": (lambda: None, keep, lambda _: setattr(KEPT, "sum", 0), lambda _, x: x + KEPT.sum),
}


def shared_net(name):
    made, *functions = SHARED[name]
    return Net(made(), *functions).double()


def case_modules_that_share_whatever_state_are_on_one_rank():
    for name in SHARED:
        model, plain = distributed(shared_net(name), microbatches=1)
        found = train_step(model)(BATCH).reduce_mean()
        torch.testing.assert_close(found, plain(BATCH).square().mean().detach(), msg=name)
        assert model.partition_report()["ties"], name
        lamina.shutdown()


def case_microbatches_draw_from_a_generator_of_their_modules_in_turns():
    for name in ("torch's generator", "Python's generator", "a global generator"):
        model, _ = distributed(shared_net(name), ["layers.1"], ["last"], microbatches=4)
        step = train_step(model)
        for _ in range(2):
            step(BATCH)
        lamina.shutdown()


def case_state_that_modules_of_different_ranks_share_is_an_error():
    HELD.scale = NAMED.scale = Registry.level = 1.0  # what another case has left would be no change
    for name in [name for name in SHARED if name != "a thread's own"]:
        model, _ = distributed(shared_net(name), ["layers.1", "layers.3"], microbatches=1, **BY_HAND)
        step = train_step(model)
        with pytest.raises(lamina.UsageError, match=r"step-attribute-shared|step-name-shared"):
            for _ in range(2):
                step(BATCH)
            pytest.fail(name)
        lamina.shutdown()


class KeptPast(nn.Linear):
    """Its parent sets its scale past `__setattr__`."""

    __slots__ = ("slot",)

    def __init__(self):
        super().__init__(6, 6)
        self.scale, self.slot = 1.0, 1.0

    def forward(self, x):
        return super().forward(x) * self.scale * self.slot


class SetsPast(nn.Module):
    def __init__(self, put):
        super().__init__()
        self.put = put
        self.first, self.second = KeptPast(), KeptPast()

    def forward(self, x):
        return self.second(self.put(self, x, x.abs().max().item()) or self.first(x))


def in_a_dictionary(module, _, value):
    module.second.__dict__["scale"] = value


def by_object(module, _, value):
    object.__setattr__(module.second, "scale", value)


def in_a_slot(module, _, value):
    module.second.slot = value


def case_attributes_that_are_set_past_the_module_are_an_error_on_other_ranks():
    for put in (in_a_dictionary, by_object, in_a_slot):
        model, _ = distributed(SetsPast(put), ["second"], microbatches=1, **BY_HAND)
        with pytest.raises(lamina.UsageError, match=r"second\.(scale|slot) is set on partition 0"):
            train_step(model)(BATCH)
        lamina.shutdown()


NORMS = [1.0]


class Measured(nn.Linear):
    """Its forward uses what its last backward has measured, and that of another one."""

    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x):
        y = super().forward(x) * NORMS[-1]
        if y.requires_grad:
            y.register_hook(lambda gradient: NORMS.append(gradient.norm().item()))
        return y


def case_what_a_backward_leaves_for_modules_of_other_ranks_is_an_error_of_the_next_step():
    NORMS[:] = [1.0]
    model, plain = distributed(nn.Sequential(Measured(), Measured()), ["1"], microbatches=1, **BY_HAND)
    step, expected = train_step(model), plain(BATCH).square().mean().detach()
    torch.testing.assert_close(step(BATCH).reduce_mean(), expected)
    with pytest.raises(lamina.UsageError, match=r"NORMS, which 1 changes on partition 1, is used by 0"):
        step(BATCH)


SCALE = contextvars.ContextVar("scale", default=1.0)
BOX = contextvars.ContextVar("box")


def read_variable(_, x):
    return x * SCALE.get()


def set_in_a_layer(_, x):
    y = x * SCALE.get()
    SCALE.set(SCALE.get() + 1)
    return y


def read_box(_, x):
    return x * BOX.get()["scale"]


def case_what_is_in_a_context_variable_goes_with_calls():
    BOX.set({"scale": 1.0})
    model, plain = distributed(
        Net(None, read_box, lambda _: BOX.get().update(scale=3.0)), ["layers.1"], microbatches=1, **BY_HAND
    )
    expected = plain(BATCH)
    BOX.set({"scale": 1.0})
    torch.testing.assert_close(lamina.step(lambda x: model(x))(BATCH).concat(), expected.detach())


def case_context_variables_go_with_calls():
    def step_of(model, scale):
        @lamina.step
        def step(x):
            SCALE.set(scale)
            return model(x)

        return step

    model, plain = distributed(Net(None, read_variable, lambda _: SCALE.set(SCALE.get() + 1)), ["layers.1", "layers.3"])
    for scale in (2.0, 3.0):
        expected = contextvars.copy_context().run(lambda scale=scale: SCALE.set(scale) and plain(BATCH))
        torch.testing.assert_close(step_of(model, scale)(BATCH).concat(), expected.detach())
    with pytest.raises(lamina.UsageError, match=r"scale .* has a tensor"):
        step_of(model, torch.ones(()))(BATCH)
    lamina.shutdown()
    model, _ = distributed(Net(None, set_in_a_layer, lambda _: None), ["layers.1"], **BY_HAND)
    with pytest.raises(lamina.UsageError, match="context variable SCALE was changed by a module"):
        step_of(model, 1.0)(BATCH)


class Noisy(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(super().forward(x))


class Seeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Noisy() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            torch.manual_seed(7)
            first = layer(x)
            torch.manual_seed(7)
            x = torch.cat([first, layer(x)]) if layer is self.layers[-1] else first
        return x + F.dropout(torch.ones_like(x), 0.5)


def case_a_seed_that_a_caller_gives_is_its_modules():
    model, plain = distributed(Seeds(), ["layers.1"])
    found = lamina.step(lambda x: model(x)[:8])(BATCH)
    for part, x in zip(found.outputs, BATCH.chunk(2), strict=True):
        first, again = part.chunk(2)
        torch.testing.assert_close(first - again, (first - again).round(), atol=1e-9, rtol=0)
        expected = plain(x)[:8]
        ours = (part - expected) / 2  # of its own numbers, which are others
        torch.testing.assert_close(ours, ours.round(), atol=1e-9, rtol=0)


class Reversed(torch.autograd.Function):
    """Keeps nothing for its backward, which computes its layers' forwards again."""

    @staticmethod
    def forward(ctx, x, layers):
        ctx.layers, ctx.x = layers, x
        with torch.no_grad():
            for layer in layers:
                x = layer(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        inputs = [ctx.x]
        with torch.no_grad():
            for layer in ctx.layers[:-1]:
                inputs.append(layer(inputs[-1]))
        for layer, x in zip(ctx.layers[::-1], inputs[::-1], strict=True):
            gradient = layer.backward_pass(x, gradient)
        return gradient, None


class Reversible(nn.Module):
    """As in Reformer; its buffer is the beginning of a sum."""

    def __init__(self):
        super().__init__()
        self.linear, self.seed = nn.Linear(6, 6), None
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x):
        self.seed = x.sum().item()
        total = self.zero
        total.requires_grad_()
        return torch.tanh(self.linear(x)) + total + self.seed / 100

    def backward_pass(self, x, gradient):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = torch.tanh(self.linear(x)) + self.seed / 100
        y.backward(gradient)
        return x.grad


class Reverses(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = linear(), linear()
        self.layers = nn.ModuleList([Reversible() for _ in range(4)])

    def forward(self, x):
        return self.last(Reversed.apply(self.first(x), self.layers))


def case_layers_that_a_functions_backward_computes_again_train():
    model, plain = distributed(Reverses(), microbatches=4)
    step = train_step(model)
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    theirs = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(2):
        losses = [plain(x).square().mean() for x in BATCH.chunk(4)]
        torch.stack(losses).mean().backward()
        torch.testing.assert_close(step(BATCH).stack(), torch.stack(losses).detach())
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    state = model.state_dict()
    assert all(torch.allclose(state[name], value) for name, value in plain.state_dict().items())


class Moded(nn.Module):
    """Notes whether it is in another mode than its caller expects."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.register_buffer("wrong", torch.zeros(()))

    def forward(self, x, training):
        self.wrong += self.training is not training
        return self.linear(x)


class ModedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = Moded()
        self.layers = nn.ModuleList([Moded() for _ in range(4)])

    def forward(self, x, training):
        self.teacher.eval()
        for layer in self.layers:
            x = layer(x, training)
            x = x + self.teacher(x, False) * x.abs().mean().item()  # which waits
        return x


def moded(**keys):
    here = ["teacher", "layers.0", "layers.2"]
    return distributed(ModedNet(), ["layers.1", "layers.3"], here, microbatches=4, **BY_HAND, **keys)[0]


def case_the_mode_that_a_body_or_forward_sets_is_its_microbatchs():
    model = moded()

    @lamina.step
    def evaluates_first(x):
        model.eval()
        with torch.no_grad():
            model(x, False).sum().item()
        model.train()
        model.backward(loss := model(x, True).square().mean())
        return loss

    @lamina.step
    def evaluates_last(x):
        model.backward(loss := model(x, True).square().mean())
        model.module.layers.eval()
        with torch.no_grad():
            model(x, False).sum().item()
        model.module.layers.train()
        return loss

    @lamina.step
    def leaves(x):
        model.module.layers.eval()
        return model(x, False).sum()

    for step, mode in ((evaluates_first, True), (evaluates_last, True), (leaves, False)):
        for _ in range(2):
            model.train()
            step(BATCH)
            found = lamina.allgather([each.training for each in model.module.layers.modules()], lamina.WORLD)
            assert found == [[mode] * 9] * 2
    wrong = {name: value.item() for name, value in model.state_dict().items() if "wrong" in name}
    assert set(wrong.values()) == {0}


def case_a_mode_that_a_body_leaves_when_the_next_has_begun_is_an_error():
    model = moded()

    @lamina.step
    def step(x):
        y = model(x, True)
        model.module.layers[0].eval()
        return y.sum()

    with pytest.raises(lamina.UsageError, match=r"the step body left layers\.0 in another mode"):
        step(BATCH)
    model.train()
    lamina.shutdown()
    model = moded(active_microbatches=1, schedule="interleaved")
    seen = []

    @lamina.step
    def one_after_another(x):
        seen.append(model.module.layers[0].training)
        y = model(x, seen[-1])
        model.module.layers[0].eval()
        return y.sum()

    one_after_another(BATCH)
    assert seen == [True, False, False, False], "on both ranks"
