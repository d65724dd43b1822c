# SPDX-License-Identifier: Apache-2.0
"""Random numbers in step functions with one partition, and which modules start a stream."""

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lamina
from lamina.modules import rng_streams
from lamina.modules.tree import ModuleTree

BATCH = torch.ones(8, 4)


class Block(nn.Module):
    """Draws more or fewer numbers, itself and in a child."""

    def __init__(self, extra=0):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.extra = extra

    def forward(self, x):
        torch.rand(self.extra)
        return self.drop(self.linear(F.dropout(x, 0.2)))


def outputs_of(module, count=2, seed=5):
    """Returns what `count` steps return, and the generator after each, in a job of its own."""
    lamina.init(microbatches=4)
    model = lamina.distribute(module)
    step = lamina.step(lambda x: model(x))
    torch.manual_seed(seed)
    found = [(step(BATCH).concat(), torch.get_rng_state()) for _ in range(count)]
    lamina.shutdown()
    return [output for output, _ in found], [state for _, state in found]


def all_equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_the_same_seed_gives_the_same_numbers_and_another_others():
    block = Block()
    first, states = outputs_of(block)
    again, states_again = outputs_of(block)
    other, _ = outputs_of(block, seed=6)
    assert all_equal(first, again) and all_equal(states, states_again)
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    rows = torch.cat(first).view(8, -1).unique(dim=0)
    assert len(rows) == 8, "each microbatch of each step has numbers of its own"


class Seeds(nn.Module):
    """Gives its block a seed before each of two calls."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, x):
        torch.manual_seed(7)
        first = self.block(x)
        torch.manual_seed(7)
        again, after = self.block(x), self.block(x)
        return torch.stack([first, again, after])


def test_a_seed_that_a_caller_gives_is_its_modules(start):
    model = lamina.distribute(Seeds())
    for part in lamina.step(lambda x: model(x))(BATCH).outputs:
        first, again, after = part
        torch.manual_seed(7)
        assert torch.equal(first, model.module.block(BATCH[: len(first)])), "as in the plain program"
        assert torch.equal(first, again) and not torch.equal(again, after)


def test_a_step_takes_one_number_from_the_process_whatever_it_draws():
    _, states = outputs_of(Block(), count=1)
    _, many = outputs_of(Block(extra=1000), count=1)
    _, none = outputs_of(nn.Linear(4, 4), count=1)
    assert all_equal(states, many) and all_equal(states, none)


def test_what_a_module_draws_changes_no_numbers_after_it():
    def last_of(extra):
        torch.manual_seed(0)
        outputs, _ = outputs_of(nn.Sequential(Constant(Block(extra)), nn.Dropout(0.5)))
        return outputs

    assert all_equal(last_of(0), last_of(7))


class Constant(nn.Module):
    """Draws, and returns its input."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        self.block(x)
        return x


def test_outside_steps_numbers_are_plain_torchs(start):
    block = Block()
    torch.manual_seed(5)
    plain = block(BATCH)
    after = torch.get_rng_state()
    model = lamina.distribute(block)
    lamina.step(lambda x: model(x))(BATCH)
    torch.manual_seed(5)
    assert torch.equal(model(BATCH), plain)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_model_that_never_draws_is_not_intercepted(start):
    call = nn.Module.__call__
    model = lamina.distribute(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU()))
    lamina.step(lambda x: model(x))(BATCH)
    assert nn.Module.__call__ is call


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_with_the_same_numbers(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, on):
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(4, 4)
            self.block = Block()
            self.on = on

        def forward(self, x):
            x = self.first(x)
            return checkpoint(self.block, x, use_reentrant=reentrant) if self.on else self.block(x)

    gradients = []
    for on in (False, True):
        lamina.init(microbatches=4)
        model = lamina.distribute(Checkpointed(on))

        @lamina.step
        def step(x, model=model):
            model.backward(model(x).square().mean())

        torch.manual_seed(5)
        step(BATCH)
        gradients.append([parameter.grad for parameter in model.parameters()])
        lamina.shutdown()
    assert all_equal(*gradients)


def test_an_error_in_a_body_leaves_the_processs_state(start):
    class Raises(nn.Module):
        def forward(self, x):
            torch.rand(3)
            torch.set_default_dtype(torch.float64)
            raise KeyError("mine")

    model = lamina.distribute(Raises())
    torch.manual_seed(5)
    with pytest.raises(KeyError, match="mine"):
        lamina.step(lambda x: model(x))(BATCH)
    failed = torch.get_rng_state()
    assert torch.get_default_dtype() == torch.float32
    torch.manual_seed(5)
    lamina.step(lambda x: None)(BATCH)
    assert torch.equal(torch.get_rng_state(), failed)


def test_each_body_has_a_default_dtype_of_its_own(start):
    @lamina.step
    def step(x):
        seen = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return seen

    assert step(BATCH) == [torch.float32] * 4
    assert torch.get_default_dtype() == torch.float32


# Which modules start a stream.

DRAWS = re.compile(
    r"\bF\.\w*(?:dropout|rrelu|fractional|gumbel|multi_head|scaled_dot)|_VF\.\w+(?<!_cell)\(|\b(?:rand|bernoulli)"
)


def torchs_own():
    kinds = [kind for kind in vars(nn.modules).values() if inspect.isclass(kind) and issubclass(kind, nn.Module)]
    return [kind for kind in kinds if kind is not nn.Module]


def source_of_calls(kind):
    """The source of a class's methods, its bases' included, but for those that make or describe a module."""
    methods = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
        methods |= {name: part for name, part in vars(base).items() if inspect.isfunction(part)}
    made = ("__init__", "reset_parameters", "_reset_parameters", "__repr__", "extra_repr")
    return "".join(inspect.getsource(part) for name, part in methods.items() if name not in made)


def without_making(kind):
    module = object.__new__(kind)
    nn.Module.__init__(module)
    return module


def draws_by_its_source(kind):
    return DRAWS.search(re.sub(r'""".*?"""|#[^\n]*', "", source_of_calls(kind), flags=re.DOTALL)) is not None


def test_every_module_of_torchs_whose_source_draws_is_known_to():
    drawing = [kind for kind in torchs_own() if draws_by_its_source(kind)]
    assert {nn.Dropout, nn.LSTM, nn.GRU, nn.RReLU, nn.FractionalMaxPool3d, nn.MultiheadAttention} <= set(drawing)
    assert [kind.__name__ for kind in drawing if not rng_streams.may_draw(without_making(kind))] == []


def test_modules_that_cannot_draw_start_no_stream():
    module = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.ReLU(), nn.LayerNorm(4)]), nn.Embedding(3, 3))
    assert not any(rng_streams.may_draw(part) for part in module.modules())


class Other(nn.Linear):
    """A module of which nobody knows what it does."""


@pytest.mark.parametrize("part", [nn.Dropout(0.0), nn.LSTM(2, 2), nn.Dropout().eval(), Other(2, 2)])
def test_modules_that_may_draw_and_those_above_them_start_streams(start, part):
    leaf, above = nn.Linear(2, 2), nn.Sequential(part)
    tree = ModuleTree(nn.Sequential(leaf, above))
    starting = [id(module) in tree.filled().starting_stream for module in tree.modules]
    assert tree.modules == [tree.root, leaf, above, part]
    assert rng_streams.agree(starting, lamina.job.current.session()) == [True, False, True, True]


def test_a_module_with_code_hung_on_it_may_draw():
    hooked, replaced = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_pre_hook(lambda module, args: args)
    replaced.forward = lambda x: x
    assert rng_streams.may_draw(hooked) and rng_streams.may_draw(replaced)
