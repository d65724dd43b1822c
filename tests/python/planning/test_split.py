# SPDX-License-Identifier: Apache-2.0
"""`lamina.split_graph` in a process that has all partitions: what the segments compute together."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from equivalence.split_models import Random, Skips, models
from torch import nn
from torch.utils import _pytree as pytree

import lamina
from lamina import _lamina
from lamina.errors import UsageError
from lamina.planning import split


@pytest.fixture(autouse=True)
def plan(monkeypatch):
    """A job of one process, which has all partitions. A seed cuts models at random in the place of the planner."""

    class Plan:
        seed = 0

        def place(self, config, operations, sizes, results):
            draw = random.Random(self.seed)
            of_variable = {}
            first = list(range(len(operations)))  # of those that are together
            for at, operation in enumerate(operations):
                tied = operation.together + [of_variable.setdefault(each, at) for each in operation.variables]
                groups = {first[each] for each in [at, *tied]}
                first = [min(groups) if each in groups else each for each in first]
            drawn = [draw.randrange(3) for _ in operations]
            return [drawn[each] for each in first], ""

    made = Plan()
    lamina.init()
    engine = SimpleNamespace(GraphOperation=SimpleNamespace, place_operations=made.place, cut_graph=_lamina.cut_graph)
    monkeypatch.setattr(split, "_lamina", engine)
    yield made
    lamina.shutdown()


def trained(model, inputs):
    """Results and gradients of two calls."""
    for _ in range(2):
        made = [each for each in pytree.tree_leaves(model(*inputs)) if isinstance(each, torch.Tensor)]
        sum((each * torch.linspace(0, 1, each.numel()).view_as(each)).sum() for each in made).backward()
    return made


def require_equal(model, inputs, least_segments):
    plain = copy.deepcopy(model)
    cut = lamina.split_graph(model, *inputs)
    assert len(list(cut.children())) >= least_segments
    for one, other in zip(trained(plain, inputs), trained(cut, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12, msg=name)
    for one, other in zip(plain.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["convolutions", "transformer", "skips"])
def test_segments_compute_what_the_model_does(name, seed, plan):
    plan.seed = seed
    make, inputs = models()[name]
    require_equal(make().double(), inputs, 2)


@pytest.mark.parametrize("seed", range(15))
def test_segments_of_random_graphs_compute_what_the_model_does(seed, plan):
    plan.seed = seed
    torch.manual_seed(seed)
    require_equal(Random(seed).double(), (torch.randn(4, 6, dtype=torch.float64),), 1)


def test_parameters_are_those_of_the_model_and_keep_their_names():
    model = Skips().double()
    cut = lamina.split_graph(model, *models()["skips"][1])
    assert set(map(id, cut.parameters())) == set(map(id, model.parameters()))
    names = {name.partition(".")[2] for name, _ in cut.named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((torch.zeros(3, 6, dtype=torch.float64), 2.0), {}, "exported x as float64 [2, 6], not as float64 [3, 6]"),
        ((torch.zeros(2, 6), 2.0), {}, "exported x as float64 [2, 6], not as float32 [2, 6]"),
        ((torch.zeros(2, 6, dtype=torch.float64), 3.0), {}, "exported factor as 2.0, not as 3.0"),
        ((torch.zeros(2, 6, dtype=torch.float64),), {"factor": 2.0}, "exported a call with other arguments"),
    ],
)
def test_a_call_with_other_arguments_is_refused(args, kwargs, words):
    cut = lamina.split_graph(Skips().double(), models()["skips"][1][0], 2.0)
    with pytest.raises(UsageError, match=words.replace("[", r"\[")):
        cut(*args, **kwargs)


def test_a_model_that_computes_something_else_in_evaluation_stays_in_its_mode():
    make, inputs = models()["convolutions"]
    cut = lamina.split_graph(make().double(), *inputs)
    with pytest.raises(UsageError, match="exported the model in training mode"):
        cut.eval()
    assert cut.training and all(part.training for part in cut.modules())
    assert not lamina.split_graph(Skips().double().eval(), *models()["skips"][1]).train().eval().training


class Keywords(nn.Linear):
    def forward(self, x, *, one, other):
        return x, super().forward(x) * one - other


def test_keywords_may_come_in_any_order_and_a_result_may_be_an_argument():
    one, other = torch.rand(3), torch.rand(3)
    model = Keywords(3, 3)
    cut = lamina.split_graph(model, torch.ones(2, 3), one=one, other=other)
    passed, made = cut(torch.ones(2, 3), other=other, one=one)
    torch.testing.assert_close(made, model(torch.ones(2, 3), one=one, other=other)[1], rtol=0, atol=0)
    assert torch.equal(passed, torch.ones(2, 3))


def test_a_model_without_operations_has_no_segments():
    cut = lamina.split_graph(nn.Identity(), torch.ones(2))
    assert list(cut.children()) == [] and torch.equal(cut(torch.zeros(2)), torch.zeros(2))


class Branches(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


class Returns(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.weight


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Branches(), "torch.export refuses the model: .*data-dependent"),
        (Returns(3, 3), "the model returns weight, which is none of what it computes"),
        (3, r"split_graph\(\) takes an nn.Module, not int"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_reason(model, words):
    with pytest.raises(UsageError, match=words):
        lamina.split_graph(model, torch.zeros(3))
