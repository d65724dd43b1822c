# SPDX-License-Identifier: Apache-2.0
"""Parameters that get their values when the model is partitioned; over several ranks in tests/multiprocess."""

import copy

import pytest
import torch
from multiprocess.cases_memory import allocated_bytes
from torch import nn

import lamina
from lamina.deferred_init import delayed, tape


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch):
    monkeypatch.setattr(tape, "SMALL_BYTES", 0)


class Own(nn.Module):
    """Initialised in many ways, some of which read what they made."""

    def __init__(self):
        super().__init__()
        self.normal = nn.Parameter(torch.randn(7, 5) * 0.02)
        self.rest = nn.Parameter(torch.empty(7, 5))
        self.rest.data.copy_(torch.arange(35.0).view(7, 5) / 3)
        self.read = nn.Parameter(torch.rand(4))
        self.scale = 1.0 if self.read.sum() > 2 else 2.0
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)).view(1, 1, 6, 6))
        self.rates = torch.linspace(0, 0.5, 3).tolist()
        self.plain = torch.randn(3)
        self.there = nn.Parameter(torch.full((3,), 2.0, device=self.plain.device) * torch.tensor([1.0, 2.0, 3.0]))
        self.numbers = torch.rand(3).numpy()
        self.small_type = nn.Parameter(torch.randn(4, 2, dtype=torch.bfloat16))
        flat = torch.randn(10)
        self.one, self.other = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
        shared = torch.randn(3, 3)
        self.shared, self.view = nn.Parameter(shared), shared.t()
        with torch.no_grad():
            self.normal[2].zero_()
            self.normal[:, 1] = 7.0


def orthogonal():
    layer = nn.Linear(5, 5)
    nn.init.orthogonal_(layer.weight)
    nn.init.trunc_normal_(layer.bias, std=0.5)
    return layer


def tied():
    model = nn.Sequential(nn.Embedding(5, 4, padding_idx=1), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    return model


def drawn_from_a_generator():
    layer = nn.Linear(5, 5)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(3))
    return layer


def rewritten():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model.apply(lambda part: nn.init.kaiming_normal_(part.weight) if isinstance(part, nn.Linear) else None)
    model[1].load_state_dict(model[0].state_dict())
    return model


def in_double():
    with lamina.model_creation(dtype=torch.float64):
        return nn.Linear(5, 5)


MODELS = {
    "linear": lambda: nn.Linear(20, 30),
    "convolution": lambda: nn.Conv2d(3, 4, 3),
    "embedding": lambda: nn.Embedding(8, 4, padding_idx=2),
    "norm": lambda: nn.BatchNorm1d(8),
    "lstm": lambda: nn.LSTM(4, 5, 2),
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16),
    "orthogonal": orthogonal,
    "tied": tied,
    "generator": drawn_from_a_generator,
    "rewritten": rewritten,
    "copied": lambda: nn.ModuleList(copy.deepcopy(layer) for layer in [nn.Linear(5, 5)] * 3),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)),
    "converted": lambda: nn.Linear(5, 5).double().half(),
    "double": in_double,
    "own": Own,
}


def equal(ours, theirs):
    assert type(ours) is type(theirs) and ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
    assert ours.device == theirs.device and ours.requires_grad == theirs.requires_grad and torch.equal(ours, theirs)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_values_are_those_without_it(start, make):
    torch.manual_seed(3)
    expected, state = make(), None
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with lamina.delay_param_initialization():
        model = make()
    assert torch.equal(torch.get_rng_state(), state)
    assert any(map(delayed.is_delayed, model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in expected.named_parameters()]
    model = lamina.distribute(model).module
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        equal(ours, theirs)
    for ours, theirs in zip(model.buffers(), expected.buffers(), strict=True):
        equal(ours, theirs)
    if make is Own:
        assert (model.scale, model.rates) == (expected.scale, expected.rates)
        assert (model.numbers == expected.numbers).all()
        equal(model.plain, expected.plain)
        model.one.data.zero_()
        assert model.shared.data_ptr() == model.view.data_ptr()
        assert model.one.untyped_storage().data_ptr() == model.other.untyped_storage().data_ptr()


def test_until_then_only_metadata_can_be_read(start):
    with lamina.delay_param_initialization(enabled=True):
        layer = nn.Linear(3, 4)
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device.type) == ((4, 3), torch.float32, "cpu")
    for use in (lambda: layer(torch.ones(3)), layer.weight.sum, layer.state_dict, layer.weight.data_ptr):
        with pytest.raises(Exception, match="delay_param_initialization"):
            use()
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    weight = layer.weight
    model = lamina.distribute(layer)
    model(torch.ones(3)).sum().backward()
    before = weight.detach().clone()
    optimizer.step()
    assert model.module.weight is weight and torch.equal(weight, before - 1)


def test_disabled_and_nested(start):
    with lamina.delay_param_initialization(False):
        assert not delayed.is_delayed(nn.Linear(2, 2).weight)
    with lamina.delay_param_initialization(), lamina.delay_param_initialization():
        inner = nn.Linear(2, 2)
    with lamina.delay_param_initialization():
        with lamina.delay_param_initialization():
            outer = nn.Linear(2, 2)
        assert not delayed.is_delayed(outer.weight)
    assert delayed.is_delayed(inner.weight) and delayed.is_delayed(outer.weight)
    assert not delayed.is_delayed(nn.Linear(2, 2).weight)


def test_small_tensors_are_made_at_once(start, monkeypatch):
    monkeypatch.setattr(tape, "SMALL_BYTES", 64)
    with lamina.delay_param_initialization():
        layer = nn.Linear(5, 4)
        assert layer.bias.sum().isfinite()
    assert delayed.is_delayed(layer.weight) and not delayed.is_delayed(layer.bias)


def test_an_error_in_the_constructor_ends_it(start):
    with pytest.raises(RuntimeError, match="shape"), lamina.delay_param_initialization():
        torch.ones(3, 4) @ torch.ones(3, 4)
    assert nn.Linear(2, 2).weight.sum().isfinite()


def test_what_it_was_made_from_must_not_change(start):
    source = torch.ones(2, 2)
    with lamina.delay_param_initialization():
        layer = nn.Linear(2, 2)
        layer.weight.data.copy_(source)
    source.zero_()
    with pytest.raises(lamina.UsageError, match="has been changed since"):
        lamina.distribute(layer)


def test_a_model_takes_the_memory_of_one_parameter_until_it_is_partitioned(start):
    size = 1 << 20
    base, most = allocated_bytes(), 0
    with lamina.delay_param_initialization():
        layers = []
        for _ in range(16):
            layers.append(nn.Linear(512, 512))
            most = max(most, allocated_bytes() - base)
        model = nn.Sequential(*layers)
    assert max(most, allocated_bytes() - base) < 3 * size
    lamina.distribute(model)
    assert allocated_bytes() - base > 16 * size
