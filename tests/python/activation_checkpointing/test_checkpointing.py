# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing in one process."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lamina

BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Block(nn.Module):
    """Saves a mask and activations; counts its runs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)
        self.runs = 0

    def forward(self, x, scale=1.0):
        self.runs += 1
        return self.dropout(F.gelu(self.layer(x))) * scale + x


def blocks(count=4):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def trained(model, x=BATCH, call=None):
    """(loss, gradients, bytes that autograd saved besides parameters) of one run from the same random state."""
    torch.manual_seed(5)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    saved = {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = (call or model)(x).square().mean()
    model.zero_grad()
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}, sum(saved.values())


def assert_trains_alike(model, plain, call=None):
    loss, gradients, saved = trained(model, call=call)
    expected, expected_gradients, expected_saved = trained(plain)
    assert torch.equal(loss, expected)
    assert gradients.keys() == expected_gradients.keys()
    assert all(torch.equal(gradient, expected_gradients[name]) for name, gradient in gradients.items())
    assert saved < expected_saved / 2


@pytest.mark.parametrize("strategy, groups", [("each", 4), ("contiguous", 1), ("group_2", 2), ("group_3", 2)])
def test_a_sequential_trains_bit_for_bit_alike_and_saves_one_tensor_per_group(strategy, groups):
    plain = blocks()
    model = copy.deepcopy(plain)
    lamina.set_activation_checkpointing(model, strategy=strategy)
    assert_trains_alike(model, plain)
    assert [block.runs for block in model] == [2] * 4 and [block.runs for block in plain] == [1] * 4
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda _: None):
        model(BATCH)
    assert len(set(kept) - {parameter.data_ptr() for parameter in model.parameters()}) <= groups


@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_3"])
def test_checkpoint_sequential_trains_alike(strategy):
    plain = blocks()
    model = copy.deepcopy(plain)
    assert_trains_alike(model, plain, lambda x: lamina.checkpoint_sequential(model, x, strategy=strategy))
    assert [block.runs for block in model] == [2] * 4


def test_checkpoint_passes_positions_and_keywords():
    plain = blocks(1)[0]
    model = copy.deepcopy(plain)
    torch.manual_seed(3)
    expected = plain(BATCH, scale=2.0)
    torch.manual_seed(3)
    output = lamina.checkpoint(model, BATCH, scale=2.0)
    assert torch.equal(output, expected)
    for result in (output, expected):
        result.sum().backward()
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)
    assert (model.runs, plain.runs) == (2, 1)


@pytest.mark.parametrize("container", [nn.ModuleList, lambda parts: nn.ModuleDict(zip("ab", parts, strict=True))])
def test_of_a_container_without_forward_each_child_is_checkpointed(container):
    inner = nn.ModuleList([Block()])
    held = container([Block(), inner])
    lamina.set_activation_checkpointing(held, pack_args_as_tuple=True)
    block = next(held.children())
    block(inner[0](BATCH)).sum().backward()
    assert (block.runs, inner[0].runs) == (2, 2)


def test_setting_it_again_changes_nothing_and_the_last_strategy_counts():
    model = blocks()
    for strategy in ("each", "each", "contiguous", "group_2", "contiguous"):
        lamina.set_activation_checkpointing(model, strategy=strategy)
        lamina.set_activation_checkpointing(model, strategy=strategy)
        for block in model:
            block.runs = 0
        model(BATCH).sum().backward()
        assert [block.runs for block in model] == [2] * 4


def test_random_numbers_are_drawn_anew_only_when_asked():
    plain = blocks(1)[0]
    for preserve, same in ((True, True), (False, False)):
        model = copy.deepcopy(plain)
        lamina.set_activation_checkpointing(model, preserve_rng_state=preserve)
        _, gradients, _ = trained(model)
        assert torch.equal(gradients["layer.weight"], trained(plain)[1]["layer.weight"]) == same


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("strategy", ["each", "contiguous"])
def test_copies_are_themselves_checkpointed_and_names_stay(copied, strategy):
    model = blocks()
    names = list(model.state_dict())
    lamina.set_activation_checkpointing(model, strategy=strategy)
    other = copied(model)
    assert list(model.state_dict()) == list(other.state_dict()) == names
    assert [name for name, _ in other.named_modules()] == [name for name, _ in blocks().named_modules()]
    with torch.no_grad():
        other[0].layer.weight.zero_()
    other(BATCH).sum().backward()
    assert [block.runs for block in other] == [2] * 4 and [block.runs for block in model] == [0] * 4
    assert other[0].layer.weight.grad is not None and model[0].layer.weight.grad is None


def test_class_signature_and_hooks_stay():
    module = Block()
    signature = inspect.signature(module.forward)
    calls = []
    module.register_forward_hook(lambda *_: calls.append("after"))
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    lamina.set_activation_checkpointing(module)
    assert type(module) is Block and inspect.signature(module.forward) == signature
    module(BATCH).sum().backward()
    assert calls == ["before", "after"] and module.runs == 2


def test_a_forward_of_the_instance_is_the_one_that_is_checkpointed():
    module = nn.Linear(6, 6, dtype=torch.float64)
    runs = []

    def forward(x):
        runs.append(x)
        return F.linear(x, module.weight).exp()

    module.forward = forward
    for _ in range(2):
        lamina.set_activation_checkpointing(module)
    module(BATCH).sum().backward()
    assert len(runs) == 2


def test_without_grad_mode_it_runs_once():
    model = blocks(1)
    lamina.set_activation_checkpointing(model)
    with torch.no_grad():
        model(BATCH)
    assert model[0].runs == 1


class Returns(Block):
    """Returns tensors in whatever container it is told to."""

    def __init__(self, pack):
        super().__init__()
        self.pack = pack

    def forward(self, pair, mask=None):
        self.runs += 1
        return self.pack(F.gelu(self.layer(pair[0] * pair[1])))


def as_tuple(y):
    return y, None, 3


def as_dict(y):
    return {"y": y, "more": [y * 2]}


def as_none(y):
    return None


@pytest.mark.parametrize("pack, first", [(as_tuple, lambda o: o[0]), (as_dict, lambda o: o["y"] + o["more"][0])])
def test_structures_of_arguments_and_results_are_as_without(pack, first):
    plain = Returns(pack)
    model = copy.deepcopy(plain)
    lamina.set_activation_checkpointing(model)
    x = BATCH.clone().requires_grad_()
    expected, output = plain((x, BATCH)), model((x, BATCH))
    assert type(output) is type(expected) and len(output) == len(expected)
    gradients = [torch.autograd.grad(first(result).sum(), x)[0] for result in (expected, output)]
    assert torch.equal(*gradients)
    assert model.runs == 2


def test_a_module_that_returns_nothing():
    model = Returns(as_none)
    lamina.set_activation_checkpointing(model)
    assert model((BATCH, BATCH)) is None


def test_frozen_modules_and_arguments_without_grad_need_no_grad():
    model = blocks(1).requires_grad_(False)
    lamina.set_activation_checkpointing(model)
    assert not model(BATCH).requires_grad
    x = BATCH.clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None


def test_a_module_called_twice():
    plain = blocks(1)[0]
    model = copy.deepcopy(plain)
    lamina.set_activation_checkpointing(model)
    expected = trained(plain, call=lambda x: plain(plain(x)))
    loss, gradients, _ = trained(model, call=lambda x: model(model(x)))
    assert torch.equal(loss, expected[0]) and model.runs == 4
    assert all(torch.equal(gradient, expected[1][name]) for name, gradient in gradients.items())


def test_nested():
    plain = nn.Sequential(blocks(2), blocks(2))
    model = copy.deepcopy(plain)
    lamina.set_activation_checkpointing(model, strategy="contiguous")
    for inner in model:
        lamina.set_activation_checkpointing(inner)
    assert_trains_alike(model, plain)
    assert all(2 <= module.runs <= 3 for module in model.modules() if isinstance(module, Block))


def test_under_autocast():
    plain = blocks().float().eval()
    model = copy.deepcopy(plain)
    lamina.set_activation_checkpointing(model, strategy="contiguous")
    for each in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = each(BATCH.float()).square().mean()
        loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain.get_parameter(name).grad)


@pytest.mark.parametrize("of_the_wrapped", [True, False])
def test_in_a_step_whether_set_before_or_after_the_model_is_distributed(start, of_the_wrapped):
    plain = blocks().eval()
    model = copy.deepcopy(plain)
    if not of_the_wrapped:
        lamina.set_activation_checkpointing(model)
    wrapped = lamina.distribute(model)
    if of_the_wrapped:
        lamina.set_activation_checkpointing(wrapped)

    @lamina.step
    def step(x):
        loss = wrapped(x).square().mean()
        wrapped.backward(loss)
        return loss

    assert torch.allclose(step(BATCH).reduce_mean(), trained(plain)[0], atol=1e-12)
    assert [block.runs for block in model] == [8] * 4
    for name, parameter in wrapped.named_parameters():
        assert torch.allclose(parameter.grad, plain.get_parameter(name).grad, atol=1e-12)


class OwnForward(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


def test_each_child_of_a_sequential_with_a_forward_of_its_own():
    model = OwnForward(Block(), Block())
    lamina.set_activation_checkpointing(model)
    model(BATCH).sum().backward()
    assert [block.runs for block in model] == [2, 2]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: lamina.set_activation_checkpointing(len), "takes an nn.Module, not builtin"),
        (lambda: lamina.checkpoint(len, []), "takes an nn.Module, not builtin"),
        (lambda: lamina.checkpoint_sequential(Block(), BATCH), "takes an nn.Sequential, not Block"),
        (lambda: lamina.checkpoint_sequential(OwnForward(), BATCH), "OwnForward has a forward of its own"),
        (lambda: lamina.set_activation_checkpointing(Block(), strategy="group_2"), "for an nn.Sequential, not Block"),
        (lambda: lamina.set_activation_checkpointing(nn.ModuleList(), strategy="group_2"), "not ModuleList"),
        (lambda: lamina.set_activation_checkpointing(Block(), True, True), "for an nn.Sequential, not Block"),
        (lambda: lamina.set_activation_checkpointing(blocks(), strategy="group_0"), "a strategy is .*not 'group_0'"),
        (lambda: lamina.set_activation_checkpointing(blocks(), strategy="all"), "a strategy is .*not 'all'"),
        (lambda: lamina.set_activation_checkpointing(OwnForward(), strategy="contiguous"), "a forward of its own"),
    ],
)
def test_what_cannot_be_is_said_at_once(call, message):
    with pytest.raises(lamina.UsageError, match=message):
        call()
