# SPDX-License-Identifier: Apache-2.0
"""DistributedModel with one partition: it is the plain model."""

import copy
import inspect

import pytest
import torch
from torch import nn

import lamina

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def test_it_works_outside_steps(start, plain):
    expected = copy.deepcopy(plain)
    model = lamina.distribute(plain)
    model.backward(model(X).mean())
    expected(X).mean().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("average, factor", [(True, 0.25), (False, 1)])
def test_gradients_are_averaged_over_microbatches(start, average, factor):
    linear = nn.Linear(4, 1, bias=False)
    model = lamina.DistributedModel(linear, average_grads_across_microbatches=average)

    @lamina.step
    def step(x):
        loss = model(x).sum()
        loss /= 1  # in place
        model.backward(loss)
        return loss

    for _ in range(2):  # what is in .grad already is not scaled
        step(X)
    assert torch.allclose(linear.weight.grad, 2 * factor * X.sum(0))


def test_backward_with_gradients(start):
    linear = nn.Linear(4, 2, bias=False)
    model = lamina.DistributedModel(linear)
    y = model(X)
    gradient = torch.randn_like(y)
    model.backward([y, y.sum()], [gradient, None])
    assert torch.allclose(linear.weight.grad, (gradient + 1).T @ X)
    with pytest.raises(lamina.UsageError, match="1 tensors, but 2 gradients"):
        model.backward(y, [None, None])
    with pytest.raises(RuntimeError, match="only a scalar's may be left out"):
        model.backward(model(X))


def test_names_are_those_of_the_wrapped_module(start, plain):
    model = lamina.DistributedModel(plain)
    assert model.get_module() is model.module is plain
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in plain.named_buffers()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert list(model.state_dict(prefix="p.")) == ["p." + name for name in plain.state_dict()]


class Scaled(nn.Sequential):
    """A model that others ask what it is."""

    factor = 2.0

    def forward(self, features, *, twice=False):
        return super().forward(features) * (self.factor if twice else 1.0)

    def doubled(self, features):
        return self(features, twice=True)


def test_it_is_taken_for_the_module_that_it_wraps(start):
    plain = Scaled(nn.Linear(4, 1))
    model = lamina.DistributedModel(plain)
    assert isinstance(model, lamina.DistributedModel)
    assert isinstance(model, Scaled)
    assert (model.__class__, model._get_name()) == (Scaled, "Scaled")
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert model.factor == 2.0
    assert torch.equal(model.doubled(X), model(X) * 2)
    model.factor = 3.0
    assert plain.factor == 3.0
    assert torch.equal(model(X, twice=True), plain(X) * 3)
    assert repr(model).startswith("DistributedModel(\n  (module): Scaled(")
    with pytest.raises(AttributeError, match="'Scaled' object has no attribute 'config'"):
        model.config  # noqa: B018
    with pytest.raises(lamina.UsageError, match="neither copied nor pickled"):
        copy.deepcopy(model)


def test_attributes_that_the_module_has_under_names_of_ours_stay_its_own(start):
    plain = nn.Linear(4, 1)
    names = ("_steps", "_calls", "_dtype", "_life", "_backwards", "_replicas")
    for name in names:
        setattr(plain, name, name)
    model = lamina.DistributedModel(plain)
    lamina.step(lambda x: model.backward(model(x).mean()))(X)
    assert model.steps == 1
    assert [getattr(plain, name) for name in names] == list(names)


def test_is_part_of_a_larger_modules_state(start, plain):
    larger = nn.ModuleDict({"inner": lamina.DistributedModel(plain)})
    assert list(larger.state_dict()) == ["inner." + name for name in plain.state_dict()]


def test_with_one_partition_all_is_local_at_once(start, plain):
    model = lamina.DistributedModel(plain)
    assert model.partitioned
    assert list(model.local_named_parameters()) == list(plain.named_parameters())
    assert list(model.local_parameters()) == list(plain.parameters())
    assert list(model.local_named_buffers()) == list(plain.named_buffers())
    assert list(model.local_buffers()) == list(plain.buffers())
    assert list(model.local_modules()) == list(plain.modules())


def test_state_goes_there_and_back(start, plain):
    model = lamina.DistributedModel(plain)
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(value, torch.ones_like(value)) for value in plain.state_dict().values())


def test_training_and_evaluation(start, plain):
    model = lamina.DistributedModel(plain).eval()
    assert not plain[1].training and not model.training
    model.train()
    assert plain[1].training


def test_there_is_one_model(start, plain):
    model = lamina.DistributedModel(plain)
    with pytest.raises(lamina.UsageError, match="DistributedModel already"):
        lamina.DistributedModel(nn.Linear(1, 1))
    with pytest.raises(lamina.UsageError, match="DistributedModel already"):
        lamina.DistributedModel(model)
    lamina.shutdown()
    lamina.init()
    lamina.DistributedModel(nn.Linear(1, 1))


def test_after_shutdown_the_module_is_still_there(start, plain):
    model = lamina.DistributedModel(plain)
    lamina.shutdown()
    model.eval()
    assert torch.equal(model(X), plain(X))


def offloaded(module):
    """As accelerate's cpu_offload leaves one."""
    module._hf_hook = object()
    return module


@pytest.mark.parametrize(
    "wrong, text",
    [
        (lambda: "model", "not str"),
        (lambda: nn.DataParallel(nn.Linear(1, 1)), "is a DataParallel of torch's"),
        (lambda: nn.Sequential(nn.Linear(1, 1, device="meta")), r"^0.weight of the model is on.*to_empty"),
        (lambda: offloaded(nn.Linear(1, 1, device="meta")), r"^weight of the model.*remove_hook_from_submodules"),
    ],
)
def test_what_cannot_be_wrapped(start, wrong, text):
    with pytest.raises(lamina.UsageError, match=text):
        lamina.DistributedModel(wrong())


@pytest.mark.parametrize(
    "option, text",
    [
        ({"trace_device": "tpu"}, "'tpu'"),
    ],
)
def test_options_that_cannot_be_had(start, option, text):
    with pytest.raises(lamina.UsageError, match=text):
        lamina.DistributedModel(nn.Linear(1, 1), **option)


def test_options_that_change_nothing_yet_are_taken(start):
    lamina.DistributedModel(
        nn.Linear(1, 1), "cpu", False, False, 2, True, 50, False, False, True, find_unused_parameters=True
    )


def test_without_slices_nothing_is_distributed(start):
    model = lamina.DistributedModel(nn.Sequential(lamina.nn.DistributedLinear(2, 2), nn.BatchNorm1d(2)))
    assert list(model.distributed_modules()) == []
    assert not any(map(model.is_distributed_parameter, model.parameters()))
    assert not any(map(model.is_scaled_batch_parameter, model.parameters()))
    assert not any(map(model.is_distributed_buffer, model.buffers()))
    assert not any(map(model.is_scaled_batch_buffer, model.buffers()))


def test_without_init(plain):
    with pytest.raises(lamina.UsageError, match="init"):
        lamina.DistributedModel(plain)


def test_a_model_in_one_piece_may_get_modules_after_it_was_distributed(start):
    model = lamina.distribute(nn.Sequential(nn.Linear(2, 2)))
    model.module.append(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    model.load_state_dict(model.state_dict())
    assert model.clip_grad_norm_(1.0) > 0 and model.half().cpu() is model
