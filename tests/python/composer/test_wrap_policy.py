# SPDX-License-Identifier: Apache-2.0
"""Units of a model, and the modules that it chooses for activation checkpointing."""

import random

import pytest
import torch
from torch import nn

import lamina
from lamina.trainer import ComposerClassifier, ComposerModel
from lamina.trainer.wrap_policy import checkpoint_chosen, table, units


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    """Blocks of 64 parameters, a head of 12."""

    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ByFunction(Network):
    def fsdp_wrap_fn(self, module):
        return isinstance(module, Block)

    def activation_checkpointing_fn(self, module):
        return isinstance(module, Block)


BLOCKS = [f"module.blocks.{at}" for at in range(3)]


def found(module, min_params=1e8):
    return {
        unit.name: (unit.rule, sum(map(nn.Parameter.numel, unit.parameters.values())))
        for unit in units_of(module, min_params)
    }


def units_of(module, min_params=1e8):
    return units(ComposerClassifier(module, num_classes=3), min_params)


def test_the_root_takes_all_where_nobody_says_anything():
    assert found(Network()) == {"module": ("root", 3 * 64 + 12)}


def test_the_function_of_the_root_is_asked_for_every_descendant():
    assert found(ByFunction()) == {"module": ("root", 12)} | dict.fromkeys(BLOCKS, ("fsdp_wrap_fn", 64))


def test_an_attribute_decides_against_the_function_and_the_size():
    network = ByFunction()
    network.blocks[1]._fsdp_wrap = False
    network.head._fsdp_wrap = True
    rules = dict.fromkeys((BLOCKS[0], BLOCKS[2]), ("fsdp_wrap_fn", 64)) | {"module.head": ("_fsdp_wrap", 12)}
    assert found(network) == {"module": ("root", 64)} | rules
    assert found(network, 63) == {"module": ("root", 64)} | rules


def test_a_no_of_the_function_leaves_it_to_the_size():
    network = ByFunction()
    network.fsdp_wrap_fn = lambda module: False
    assert found(network, 63) == {"module": ("root", 12)} | dict.fromkeys(BLOCKS, ("min_params", 64))


def test_a_size_is_more_than_the_least_and_counts_what_is_in_no_unit_yet():
    assert found(Network(), 64) == {"module": ("root", 3 * 64 + 12)}
    assert found(Network(1), 31) == {
        "module": ("root", 12),
        "module.blocks.0.up": ("min_params", 32),
        "module.blocks.0.down": ("min_params", 32),
    }


def test_a_list_that_nobody_calls_is_no_unit():
    network = Network()
    network.blocks._fsdp_wrap = True
    assert found(network, 100) == {"module": ("root", 3 * 64 + 12)}


def test_a_root_may_stay_whole():
    network = ByFunction()
    network._fsdp_wrap = False
    assert found(network) == {"module": ("whole", 3 * 64 + 12)}


def test_each_child_is_a_root_but_metrics_and_what_is_in_none_stays_whole():
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(torchmetrics.MeanMetric):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(2, 2, bias=False)

    class Two(ComposerModel):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.one, self.other, self.metric = ByFunction(1), nn.Linear(5, 1), Measured()

        def forward(self, batch):
            raise NotImplementedError

        loss = forward

    names = {unit.name: (unit.rule, list(unit.parameters)) for unit in units(Two(), 1e8)}
    assert names == {
        "": ("whole", ["scale", "metric.inside.weight"]),
        "one": ("root", ["one.head.weight"]),
        "one.blocks.0": ("fsdp_wrap_fn", ["one.blocks.0.up.weight", "one.blocks.0.down.weight"]),
        "other": ("root", ["other.weight", "other.bias"]),
    }


def test_tied_parameters_are_in_the_first_unit_that_has_them():
    network = ByFunction(2)
    network.blocks[1].up.weight = network.blocks[0].up.weight
    assert found(network) == {
        "module": ("root", 12),
        BLOCKS[0]: ("fsdp_wrap_fn", 64),
        BLOCKS[1]: ("fsdp_wrap_fn", 32),
    }


class Tree(nn.Module):
    """A random one: modules and lists of them, parameters, ties, attributes and answers."""

    def __init__(self, draw, depth, pool, says):
        super().__init__()
        self.says = says and draw.random() < 0.3
        if draw.random() < 0.3:
            self._fsdp_wrap = draw.random() < 0.5
        for at in range(draw.randint(0, 2)):
            if not pool or draw.random() < 0.8:
                pool.append(nn.Parameter(torch.empty(draw.randint(1, 9))))
            self.register_parameter(f"p{at}", draw.choice([pool[-1], draw.choice(pool)]))
        for at in range(draw.randint(0, 3) if depth else 0):
            children = [Tree(draw, depth - 1, pool, says) for _ in range(draw.randint(1, 2))]
            self.add_module(f"m{at}", nn.ModuleList(children) if draw.random() < 0.3 else children[0])

    def forward(self):
        raise NotImplementedError

    def fsdp_wrap_fn(self, module):
        return module.says


def expected(module, name, least, taken, answers):
    """The units below and of a module, by another way: a recursion that gives back what it leaves."""
    names, left = {}, []
    for child_name, child in module.named_children():
        below, rest = expected(child, f"{name}.{child_name}", least, taken, answers)
        names |= below
        left += rest
    own = [each for each in module._parameters.values() if each is not None]
    left = [each for each in {id(each): each for each in left + own}.values() if id(each) not in taken]
    if isinstance(module, nn.ModuleList):
        return names, left
    large = sum(each.numel() for each in left) > least
    wraps = module.__dict__.get("_fsdp_wrap", answers(module) or large)
    if wraps and left:
        names[name] = {id(each) for each in left}
        taken |= names[name]
        left = []
    return names, left


@pytest.mark.parametrize("number", range(60))
def test_random_trees_have_the_units_of_the_rules(number):
    draw = random.Random(number)
    root = Tree(draw, 4, [], draw.random() < 0.7)
    root.__dict__.pop("_fsdp_wrap", None)
    least = draw.choice([0, 5, 20, 1e8])
    names, taken = {}, set()
    root._fsdp_wrap = True
    names, _ = expected(root, "module", least, taken, lambda module: module.says)
    assert {unit.name: set(map(id, unit.parameters.values())) for unit in units_of(root, least)} == names


def test_the_table_has_a_line_for_each_unit_and_each_checkpointed_module():
    network = ByFunction(1)
    text = table(units_of(network), ["module.blocks.0", "module.blocks.0.up"], 3)
    assert text.splitlines() == [
        "module              rule          parameters  bytes here  checkpointed",
        "module              root          12          16",
        "module.blocks.0     fsdp_wrap_fn  64          88          yes",
        "module.blocks.0.up                0           0           yes",
    ]


# Activation checkpointing.


def runs(model, batch):
    """Gradients, and how often each module's forward ran."""
    counts = dict.fromkeys((name for name, _ in model.named_modules()), 0)
    handles = []
    for name, module in model.named_modules():

        def count(*_, name=name):
            counts[name] += 1

        handles.append(module.register_forward_hook(count))
    model.zero_grad()
    model.loss(model(batch), batch).backward()
    for handle in handles:
        handle.remove()
    return [parameter.grad.clone() for parameter in model.parameters()], counts


BATCH = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])


def test_chosen_modules_run_again_and_gradients_are_the_same():
    model = ComposerClassifier(ByFunction(), num_classes=3)
    model.module.blocks[1]._activation_checkpointing = False
    model.module.head._activation_checkpointing = True
    plain, _ = runs(model, BATCH)
    chosen = ["module.blocks.0", "module.blocks.2", "module.head"]
    assert checkpoint_chosen(model) == chosen
    again, counts = runs(model, BATCH)
    assert all(map(torch.equal, plain, again))
    assert [name for name in BLOCKS if counts[f"{name}.up"] == 2] == chosen[:2]


def test_chosen_modules_inside_of_chosen_ones_are_checkpointed_too():
    chain = nn.Sequential(Block(), nn.Sequential(Block(), nn.Tanh()))
    module = nn.Sequential(chain, nn.Linear(4, 3))
    module.activation_checkpointing_fn = lambda each: isinstance(each, (Block, nn.Sequential)) and each is not module
    model = ComposerClassifier(module, num_classes=3)
    plain, _ = runs(model, BATCH)
    assert checkpoint_chosen(model) == ["module.0", "module.0.0", "module.0.1", "module.0.1.0"]
    again, counts = runs(model, BATCH)
    assert all(map(torch.equal, plain, again))
    assert counts["module.0.1.0.up"] > 2 and counts["module.1"] == 1


def test_a_list_that_nobody_calls_chooses_nothing():
    model = ComposerClassifier(Network(), num_classes=3)
    model.module.blocks._activation_checkpointing = True
    with pytest.warns(UserWarning, match="no module is chosen"):
        assert checkpoint_chosen(model) == []


def test_names_in_a_state_stay():
    model = ComposerClassifier(ByFunction(), num_classes=3)
    names = list(model.state_dict())
    checkpoint_chosen(model)
    assert list(model.state_dict()) == names
    assert not lamina.is_initialized()
