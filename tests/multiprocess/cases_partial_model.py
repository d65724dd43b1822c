# SPDX-License-Identifier: Apache-2.0
"""Cases of a model of which each of two ranks owns only a part. Each begins without a job; both ranks run it."""

import copy
import os

import pytest
import torch
from multiprocess.steps import train_step
from torch import nn

import lamina

RANK = int(os.environ.get("RANK", 0))
BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Late(nn.Module):
    """Its buffer and its parameter come with its first call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", None)
        self.register_buffer("hidden", None, persistent=False)
        self.register_parameter("scale", None)

    def forward(self, x):
        if self.mean is None:
            self.mean = torch.full((6,), 2.0)
            self.hidden = torch.ones(6)
            self.scale = nn.Parameter(torch.full((6,), 3.0))
        return self.linear(x) * self.scale + self.mean


def cut(*parts, **options):
    """A model whose parts live on the ranks in turn, cut at once; and a copy made before."""
    lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0)
    torch.manual_seed(0)
    parts = [part() for part in parts]
    module = nn.Sequential(*parts)
    plain = copy.deepcopy(module)
    for number, part in enumerate(parts):
        lamina.set_partition(part, number % 2)
    return lamina.distribute(module, **options), plain


def linear():
    return nn.Linear(6, 6)


def agrees(model, plain, loss, expected):
    assert torch.allclose(loss.reduce_mean(), expected, atol=1e-6)
    for name, parameter in model.local_named_parameters():
        ours, theirs = parameter.grad, plain.get_parameter(name).grad
        assert (ours is None) == (theirs is None), name
        assert ours is None or torch.allclose(ours, theirs, atol=1e-6), name


def uncut():
    """A model of two layers that lamina is to cut; and a copy of it."""
    lamina.init(partitions=2, microbatches=4, timeout_s=30)
    torch.manual_seed(0)
    module = nn.Sequential(linear(), linear())
    plain = copy.deepcopy(module)
    return lamina.distribute(module), plain


def both(model, plain):
    """A step of the model and of the plain one, compared."""
    expected = plain(BATCH).square().mean()
    expected.backward()
    agrees(model, plain, train_step(model)(BATCH), expected)


def case_what_was_none_when_the_model_was_cut_is_in_the_state_of_every_rank():
    model, plain = cut(linear, Late)
    both(model, plain)
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected) and "1.mean" in state and "1.scale" in state
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    other = copy.deepcopy(plain)
    other.load_state_dict(state)
    model.load_state_dict(state)
    assert list(model.state_dict()) == list(expected)


def case_what_became_none_after_the_model_was_cut_is_in_no_state():
    model, plain = cut(linear, linear)
    both(model, plain)
    if RANK == 1:
        model.module[1].bias = None
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight"]


def case_a_value_elsewhere_keeps_its_metadata():
    model, plain = cut(linear, linear, linear)
    total = sum(p.numel() for p in model.parameters())
    train_step(model)(BATCH)
    assert sum(p.numel() for p in model.parameters()) == total == sum(p.numel() for p in plain.parameters())
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        for read in (
            lambda p: (p.shape, p.dtype, p.device, p.requires_grad, p.is_leaf, p.ndim, p.layout),
            lambda p: (p.numel(), p.element_size(), p.is_floating_point(), p.is_complex(), p.dim(), p.size(0), len(p)),
            lambda p: (p.stride(), p.is_contiguous(), p.nbytes, p.is_sparse, p.is_meta, p.is_cuda, type(p)),
        ):
            assert read(ours) == read(theirs), name
        assert name in dict(model.named_parameters())
    foreign = model.module[1 - RANK].weight
    for use in (
        foreign.data_ptr,
        foreign.tolist,
        lambda: foreign.detach().numpy(),
        lambda: foreign + 1,
        lambda: foreign.data.sum(),
        lambda: torch.nn.functional.linear(BATCH, foreign),
        lambda: foreign.untyped_storage().data_ptr(),
        foreign.clone,
        lambda: bool(foreign.sum() > 0),
        lambda: foreign[0, 0].item(),
    ):
        with pytest.raises(Exception, match=rf"{1 - RANK}\.weight lives in partition {1 - RANK}"):
            use()


def case_a_model_can_be_printed_and_walked():
    model, plain = cut(linear, linear)
    train_step(model)(BATCH)
    assert repr(plain[0]) in repr(model) and repr(model.module) == repr(plain)
    own, foreign = model.module[RANK].weight, model.module[1 - RANK].weight
    assert repr(own) == repr(nn.Parameter(own.detach().clone()))
    there = f"{1 - RANK}.weight lives in partition {1 - RANK} on rank {1 - RANK}"
    text = f"tensor(..., size=(6, 6), dtype=torch.float32, requires_grad=True; {there})"
    assert repr(foreign) == str(foreign) == f"Parameter containing:\n{text}"
    assert repr(foreign.data) == text.replace(", requires_grad=True", "")
    lamina.shutdown()
    assert there in f"{foreign}"
    seen = []
    model.apply(lambda module: seen.append(type(module)))
    assert seen.count(nn.Linear) == 2
    assert len(list(model.children())) == 1 and len(list(model.modules())) == 3


def case_modes_and_gradients_are_set_on_every_rank():
    model, plain = cut(linear, lambda: nn.Dropout(0.0), linear)
    both(model, plain)
    model.zero_grad(set_to_none=False)
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name
    plain.zero_grad()
    both(model, plain)
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    assert not any(module.training for module in model.modules())
    model.train()
    assert all(module.training for module in model.modules())
    model.requires_grad_(False)
    model.module[2].requires_grad_(True)
    plain.requires_grad_(False)
    plain[2].requires_grad_(True)
    plain.zero_grad()
    both(model, plain)


def case_moving_the_model_to_where_it_is_changes_nothing():
    model, plain = uncut()
    parameters = list(model.parameters())
    assert model.to("cpu") is model and model.cpu() is model and model.to(torch.device("cpu")) is model
    both(model, plain)
    assert model.to("cpu") is model and model.cpu() is model and model.float() is model
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
    plain.zero_grad()
    model.zero_grad()
    both(model, plain)


def case_a_device_is_ignored_before_the_cut():
    model, plain = uncut()
    assert model.to("meta") is model and model.to(torch.device("meta"), torch.float32) is model
    both(model, plain)


def case_a_change_of_dtype_before_the_cut_is_the_models():
    model, plain = (one.double() for one in uncut())
    global BATCH
    given, BATCH = BATCH, BATCH.double()
    try:
        both(model, plain)
    finally:
        BATCH = given


def case_a_change_of_dtype_after_the_cut_is_the_models():
    model, plain = cut(linear, linear)
    both(model, plain)
    model.zero_grad()
    plain.zero_grad()
    model.double()
    plain.double()
    global BATCH
    given, BATCH = BATCH, BATCH.double()
    try:
        assert all(p.dtype == torch.float64 for p in model.parameters())
        both(model, plain)
        assert all(value.dtype == torch.float64 for value in model.state_dict().values())
        with pytest.raises(lamina.UsageError, match=rf"{1 - RANK}\.weight lives in partition"):
            model.module[1 - RANK].weight.sum()
    finally:
        BATCH = given


def case_a_copy_made_before_the_cut_stays_whole():
    lamina.init(partitions=2, microbatches=4, timeout_s=30)
    torch.manual_seed(0)
    module = nn.Sequential(linear(), linear())
    model = lamina.distribute(module)
    average = copy.deepcopy(module)
    swa = torch.optim.swa_utils.AveragedModel(module)
    expected = copy.deepcopy(average.state_dict())
    train_step(model)(BATCH)
    output = average(BATCH)  # outside of steps, on every rank
    assert torch.allclose(swa(BATCH), output)
    assert all(torch.equal(value, expected[name]) for name, value in average.state_dict().items())
    assert lamina.allgather([value.tolist() for value in average.parameters()], lamina.WORLD)
    state = model.state_dict()
    average.load_state_dict(state)
    with torch.no_grad():
        for name, value in average.named_parameters():
            value.lerp_(state[name], 0.1)


def case_a_copy_made_after_the_cut_is_an_error_that_says_why():
    model, _ = cut(linear, linear)
    train_step(model)(BATCH)
    with pytest.raises(Exception, match=r"lives in partition"):
        copy.deepcopy(model.module)


def case_optimizers_follow_the_cut_whenever_they_are_made():
    lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0)
    torch.manual_seed(0)
    module = nn.Sequential(linear(), linear())
    plain = copy.deepcopy(module)
    lamina.set_partition(module[1], 1)

    def groups(m):
        return [{"params": [m[0].weight, m[1].weight], "lr": 0.1}, {"params": [m[0].bias, m[1].bias], "lr": 0.2}]

    raw = torch.optim.SGD(groups(module), lr=0.3, momentum=0.9)
    theirs = torch.optim.SGD(groups(plain), lr=0.3, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (raw, theirs)]
    model = lamina.distribute(module)
    early = lamina.DistributedOptimizer(raw)
    schedulers.append(torch.optim.lr_scheduler.LinearLR(early))
    schedulers.append(torch.optim.lr_scheduler.LinearLR(theirs))
    kept = [group for group in early.param_groups]
    assert isinstance(early, torch.optim.Optimizer)
    early.zero_grad(set_to_none=True)
    for _ in range(3):
        both(model, plain)
        for optimizer in (early, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for scheduler in schedulers:
            scheduler.step()
        assert all(one is other for one, other in zip(early.param_groups, kept, strict=True))
        assert [group["lr"] for group in early.param_groups] == [group["lr"] for group in theirs.param_groups]
    for name, parameter in model.local_named_parameters():
        assert torch.allclose(parameter, plain.get_parameter(name), atol=1e-6), name
    late = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert len(late.param_groups[0]["params"]) == 2


def case_an_optimizer_that_is_left_without_parameters():
    lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0)
    module = nn.Sequential(linear(), nn.Tanh())
    optimizer = lamina.DistributedOptimizer(torch.optim.Adam(module.parameters()))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model = lamina.distribute(module)
    for _ in range(2):
        train_step(model)(BATCH)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert len(optimizer.param_groups[0]["params"]) == (2 if RANK == 0 else 0)
    optimizer.load_state_dict(optimizer.state_dict())


def case_norms_count_what_lives_elsewhere():
    model, plain = cut(linear, linear, linear)
    both(model, plain)
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    ours = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert torch.allclose(ours, expected)
    assert torch.allclose(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01), expected)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    for name, parameter in model.local_named_parameters():
        assert torch.allclose(parameter.grad, plain.get_parameter(name).grad, atol=1e-6)


def case_weights_tied_after_construction_live_together():
    lamina.init(partitions=2, microbatches=4, timeout_s=30)
    torch.manual_seed(0)
    module = nn.Sequential(*(linear() for _ in range(4)))
    model = lamina.distribute(module)
    module[3].weight = module[0].weight
    plain = copy.deepcopy(module)
    both(model, plain)
    model.zero_grad()
    plain.zero_grad()
    both(model, plain)


def case_parametrized_modules():
    def spectral():
        return nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))

    def weighted():
        return nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def old():
        return nn.utils.weight_norm(nn.Linear(6, 6))

    for part in (weighted, spectral, old):
        model, plain = cut(part, part) if part is not old else (None, None)
        if part is old:
            torch.manual_seed(0)
            lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0)
            module = nn.Sequential(old(), old())
            torch.manual_seed(0)
            plain = nn.Sequential(old(), old())
            lamina.set_partition(module[1], 1)
            model = lamina.distribute(module)
        for m in (model, plain):
            m.eval() if part is spectral else m
        both(model, plain)
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        lamina.shutdown()


def case_a_lazy_module_without_shape_is_an_error_on_every_rank():
    lamina.init(partitions=2, microbatches=4, timeout_s=30)
    model = lamina.distribute(nn.Sequential(linear(), nn.LazyLinear(3)))
    with pytest.raises(lamina.UsageError, match=r"1\.weight has no shape yet"):
        train_step(model)(BATCH)


def case_a_lazy_module_that_was_run_is_an_ordinary_one():
    lamina.init(partitions=2, microbatches=4, timeout_s=30)
    torch.manual_seed(0)
    module = nn.Sequential(linear(), nn.LazyLinear(3))
    module(BATCH)
    plain = copy.deepcopy(module)
    both(lamina.distribute(module), plain)


class Offset(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("offset", torch.randn(6), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.linear(x) + self.offset


def case_buffers_that_do_not_persist_are_used_and_not_saved():
    model, plain = cut(Offset, Offset)
    both(model, plain)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict()) and "1.offset" not in state
    assert state["0.calls"] == state["1.calls"] == 4
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]


class KeepsItsMask(nn.Module):
    """It reads after a call of a remote child what it kept over it, and so does the step body."""

    scale = 2.0

    def __init__(self):
        super().__init__()
        self.first, self.last = linear(), linear()
        self.calls = 0

    def forward(self, x):
        self.mask = (x.sum(-1, keepdim=True) > 0).to(x.dtype)
        self.before = self.first(x)
        if self.before.sum().item() > 1e9:
            return self.before
        self.calls += 1
        self.scale = self.scale * 1.0
        return self.last(torch.relu(self.before)) * self.mask + self.scale * self.before


def case_what_a_module_keeps_in_attributes_is_each_microbatchs_own():
    lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0)
    torch.manual_seed(0)
    module = KeepsItsMask()
    plain = copy.deepcopy(module)
    lamina.set_partition(module.first, 1)
    model = lamina.distribute(module)

    @lamina.step
    def train(x):
        loss = (model(x) * (1 + module.mask)).square().mean()
        model.backward(loss)
        return loss

    for steps in (1, 2):
        expected = (plain(BATCH) * (1 + plain.mask)).square().mean()
        expected.backward()
        agrees(model, plain, train(BATCH), expected)
        if RANK == 0:
            assert module.calls == 4 * steps
    assert KeepsItsMask.scale == module.scale == 2.0
    if RANK == 0:
        assert module.mask.shape == (2, 1)
        del module.mask
        assert not hasattr(module, "mask")
    lamina.shutdown()
    assert not hasattr(module, "mask")
    assert (vars(KeepsItsMask)["scale"], "calls" in vars(KeepsItsMask)) == (2.0, False)
