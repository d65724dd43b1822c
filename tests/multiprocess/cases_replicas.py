# SPDX-License-Identifier: Apache-2.0
"""Cases for two ranks that are two copies of a model."""

import contextlib
import copy
import itertools
import json
import os
import pathlib
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from multiprocess.replicas import (
    agrees,
    batch,
    close,
    share,
    train,
    train_on_sizes,
    train_past_failures,
    train_unevenly,
    whole,
)
from multiprocess.steps import train_step
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.checkpoint import checkpoint

import lamina

RANK = int(os.environ.get("RANK", 0))


def start(**keys):
    lamina.init(**({"ddp": True, "microbatches": 2, "timeout_s": 30} | keys))


def seeded(*layers, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(layer() for layer in layers)).double()


def linear(seed=0):
    return seeded(lambda: nn.Linear(6, 4), nn.Tanh, lambda: nn.Linear(4, 1), seed=seed)


def case_it_trains_like_one_process_with_the_whole_batch():
    start()
    train(linear())


def case_copies_with_batches_of_other_sizes_train_like_one_process_with_all():
    for microbatches in (1, 3):
        start(microbatches=microbatches)
        train_on_sizes(linear(), [[8, 8], [5, 7], [1, 9], [3, 2]])
        lamina.shutdown()


def case_a_copy_that_calls_torchs_backward_counts_as_the_others():
    start(microbatches=1)
    plain, model = linear(), lamina.distribute(linear())

    @lamina.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss) if lamina.dp_rank() == 0 else loss.backward()

    sizes = [4, 8]
    for _ in range(2):
        plain.zero_grad()
        model.zero_grad()
        step(batch(lamina.dp_rank(), sizes[lamina.dp_rank()]))
        sum(plain(batch(number, size)).square().mean() / 2 for number, size in enumerate(sizes)).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            close(ours.grad, theirs.grad)


def case_a_copy_may_evaluate_alone_between_steps_of_other_sizes():
    start()
    plain, model = linear(), lamina.distribute(linear())
    step = train_step(model)
    evaluate = lamina.step(lambda x: model(x))
    for number, sizes in enumerate([[4, 7], [6, 3]]):
        for _ in range(number + 1 if lamina.dp_rank() == 0 else 0):
            with torch.no_grad():
                evaluate(batch(0, 5))
        plain.zero_grad()
        model.zero_grad()
        step(batch(lamina.dp_rank(), sizes[lamina.dp_rank()]))
        plain(torch.cat([batch(each, size) for each, size in enumerate(sizes)])).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            close(ours.grad, theirs.grad)


def case_gradients_may_be_views_of_their_buckets():
    start()
    plain = linear()
    model = lamina.distribute(copy.deepcopy(plain), gradient_as_bucket_view=True, bucket_cap_mb=1e-4)
    step = train_step(model)
    for number in range(4):
        (plain(whole()).square().mean()).backward()
        step(share())
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            close(ours.grad, theirs.grad)
        if number == 1:  # and then they add up
            continue
        storages = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
        assert len(storages) < len(list(model.parameters())), "several lie in one bucket"
        for each in (plain, model):
            each.zero_grad()


def case_all_copies_begin_with_the_values_of_rank_0():
    for ddp in (True, False):
        start(ddp=ddp)
        model = lamina.distribute(linear(seed=RANK))
        assert all(torch.equal(value, linear().state_dict()[name]) for name, value in model.state_dict().items())
        lamina.shutdown()


def case_a_plain_loop_trains_alike():
    start()
    plain = linear()
    model = lamina.distribute(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for _ in range(3):
        plain(whole()).square().mean().backward()
        model(share()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close(ours, theirs)


def case_a_backward_that_reaches_no_parameter_is_none():
    start()
    model = lamina.distribute(linear())
    x = share().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert gradient.shape == x.shape
    if RANK == 0:
        torch.autograd.grad(model(x).sum(), x)  # nothing of it is collective
    model(x).sum().backward()
    assert all(agrees(parameter.grad) for parameter in model.parameters())


def case_a_backward_that_failed_leaves_the_next_one_alone():
    start()
    model = lamina.distribute(linear())

    def fail(gradient):
        raise ZeroDivisionError

    hook = model.module[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError):
        model(share()).sum().backward()
    hook.remove()
    model(share()).sum().backward()
    assert all(agrees(parameter.grad) for parameter in model.parameters())


class Branches(nn.Module):
    """Uses of its parts those that it is told to."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 1, bias=False) for _ in range(4)])
        self.parts[3].requires_grad_(False)

    def forward(self, x, used):
        return sum(self.parts[i](x) for i in used)


def case_torchs_helpers_of_state_dicts_see_the_plain_model():
    start()
    model = lamina.distribute(linear())
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    train_step(model)(share())
    optimizer.step()
    assert get_model_state_dict(model).keys() == model.module.state_dict().keys()
    ours, plain = get_optimizer_state_dict(model, optimizer), get_optimizer_state_dict(model.module, optimizer)
    torch.testing.assert_close(ours["state"], plain["state"], rtol=0, atol=0)
    assert ours["param_groups"] == plain["param_groups"] and "0.weight" in ours["state"]
    for name, value in ours["state"].items():
        ours["state"][name] = {key: torch.full_like(each, 2) for key, each in value.items()}
    set_optimizer_state_dict(model, optimizer, ours)
    set_model_state_dict(model, {name: torch.ones_like(each) for name, each in model.state_dict().items()})
    assert all(each.eq(1).all() for each in model.parameters())
    assert all(each.eq(2).all() for state in optimizer.state.values() for each in state.values())


def case_a_module_that_came_later_is_refused_in_the_words_of_a_plain_loop():
    start()
    model = lamina.distribute(linear())
    model(share()).sum().backward()
    model.module.append(nn.Linear(1, 1).double())
    with pytest.raises(lamina.UsageError, match=r"3 came into the model after lamina\.DistributedModel was made"):
        lamina.save_checkpoint("unused", "a")


def case_torchs_helpers_refuse_an_optimizer_of_masters():
    start(bf16=True)
    model = lamina.distribute(linear().bfloat16())
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    train_step(model)(share().bfloat16())
    optimizer.step()
    with pytest.raises(lamina.UsageError, match=r"or masters: take optimizer\.state_dict"):
        get_optimizer_state_dict(model, optimizer)
    lamina.shutdown()


def case_gradients_that_are_missing_everywhere_stay_none_and_on_one_copy_count_as_zero():
    start()
    model = lamina.distribute(Branches().double())
    parts = model.module.parts

    @lamina.step
    def step(x):
        model.backward(model(x, [0, 2 * RANK, 3]).sum())

    step(share())
    alone = (batch(1).sum(0, keepdim=True) / 2, batch(0).sum(0, keepdim=True) / 2)  # microbatches are averaged
    close(parts[2].weight.grad, alone[0] / 2)
    close(parts[0].weight.grad, alone[0] / 2 + alone[1])
    assert parts[1].weight.grad is None and parts[3].weight.grad is None


def case_a_parameter_may_be_trained_later():
    start()
    model = lamina.distribute(Branches().double())
    model.module.parts[3].requires_grad_(True)
    model(share(), [3]).sum().backward()
    assert agrees(model.module.parts[3].weight.grad)


def case_parameters_that_are_replaced_by_loading_are_averaged():
    start()
    model = lamina.distribute(linear())
    model.load_state_dict({name: value + 1 for name, value in linear().state_dict().items()}, assign=True)
    model(share()).sum().backward()
    assert all(agrees(parameter.grad) for parameter in model.parameters())


def case_gradients_accumulate_until_the_nth_step():
    start()
    model = lamina.DistributedModel(seeded(lambda: nn.Linear(6, 1, bias=False)), backward_passes_per_step=3)
    (weight,) = model.parameters()

    @lamina.step
    def step(x):
        model.backward(model(x).sum())

    evaluate = lamina.step(lambda x: model(x))
    each = share().sum(0, keepdim=True) / 2
    for calls in (1, 2):
        step(share())
        evaluate(share())
        close(weight.grad, calls * each)
    step(share())
    close(weight.grad, 3 * whole().sum(0, keepdim=True) / 4)
    step(share())  # the next three
    close(weight.grad, 3 * whole().sum(0, keepdim=True) / 4 + each)


def case_gradients_accumulate_until_the_nth_backward_of_a_plain_loop():
    start()
    model = lamina.DistributedModel(seeded(lambda: nn.Linear(6, 1, bias=False)), backward_passes_per_step=2)
    (weight,) = model.parameters()
    model(share()).sum().backward()
    close(weight.grad, share().sum(0, keepdim=True))
    model(share()).sum().backward()
    close(weight.grad, whole().sum(0, keepdim=True))


def case_a_step_without_backward_is_not_collective():
    start()
    model = lamina.distribute(linear())
    evaluate = lamina.step(lambda x: model(x))
    for _ in range(1 + RANK):
        evaluate(share())


def case_a_step_that_fails_on_one_copy_fails_on_all_and_the_next_is_exact():
    start()
    train_past_failures(linear())


def case_a_step_that_fails_without_gradients_is_no_pass():
    start()
    model = lamina.distribute(linear())

    @lamina.step
    def evaluate(x):
        raise KeyError("mine")

    if RANK == 0:
        with pytest.raises(KeyError, match="mine"), torch.no_grad():
            evaluate(share())
    train_step(model)(share())
    assert all(agrees(parameter.grad) for parameter in model.parameters())


def case_passes_that_accumulate_fail_on_all_as_well():
    start()
    model = lamina.DistributedModel(seeded(lambda: nn.Linear(6, 1, bias=False)), backward_passes_per_step=2)
    (weight,) = model.parameters()

    @lamina.step
    def step(x, fails):
        if fails:
            raise KeyError("mine")
        model.backward(model(x).sum())

    step(share(), False)
    with pytest.raises(KeyError, match="mine"):
        step(share(), RANK == 1)
    step(share(), False)  # the pass that failed has accumulated nowhere: its first backward meets the others
    close(weight.grad, 2 * whole().sum(0, keepdim=True) / 4)


def case_a_backward_of_a_plain_loop_that_fails_on_one_copy_fails_on_all():
    start()
    model = lamina.distribute(linear())

    def fail(gradient):
        raise ZeroDivisionError

    for backward in (model.backward, torch.Tensor.backward):
        heard = ZeroDivisionError if backward == model.backward else lamina.RemoteError
        for fails in (False, True, False):
            model.zero_grad()
            output = model(share())
            if fails and RANK == 1:
                output.register_hook(fail)
            with pytest.raises(ZeroDivisionError if RANK == 1 else heard) if fails else contextlib.nullcontext():
                backward(output.square().mean())
        plain = linear()
        plain(whole()).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            close(ours.grad, theirs.grad)


def case_a_step_that_fails_in_join_fails_on_all_and_the_next_is_exact():
    start()
    with contextlib.ExitStack() as joined:
        distribute = lamina.distribute

        def distribute_and_join(module):
            model = distribute(module)
            joined.enter_context(model.join())
            return model

        lamina.distribute = distribute_and_join
        try:
            train_past_failures(linear())
        finally:
            lamina.distribute = distribute


def iteration(model, optimizer):
    optimizer.zero_grad()
    model(share()).sum().backward()
    optimizer.step()


def fails_alone(model):
    with contextlib.suppress(RuntimeError):
        model(torch.ones(3))


ODD_ITERATIONS = {
    "without backward and step": lambda model, optimizer: model(share()),
    "without backward": lambda model, optimizer: (model(share()), optimizer.step()),
    "without step": lambda model, optimizer: model(share()).sum().backward(),
    "with two backwards": lambda model, optimizer: [model(share()).sum().backward() for _ in range(2)],
    "with an error that is caught": lambda model, optimizer: fails_alone(model),
}


def case_a_copy_that_leaves_out_a_part_of_an_iteration_is_told_of_at_the_next_exchange():
    for odd in ODD_ITERATIONS.values():
        start()
        model = lamina.distribute(linear())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        iteration(model, optimizer)
        told = r"different iterations: replica 0 .*; replica 1 .*replica-iterations|waits in .*step-mutual-wait"
        with pytest.raises(lamina.DesyncError, match=told):
            (odd if RANK == 1 else iteration)(model, optimizer)
            iteration(model, optimizer)
        lamina.shutdown()


def case_calls_that_are_not_trained_may_differ():
    start()
    model = lamina.distribute(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(1 + RANK):
            with torch.no_grad():
                model(share())
            model.eval()
            model(share())
            model.train()
        losses = [model(share()).sum() for _ in range(2 - RANK)]
        sum(losses).backward()
        optimizer.step()
    assert all(agrees(parameter) for parameter in model.parameters())


class Plain:
    """The plain model of one process beside the distributed one, each with its optimizer."""

    def __init__(self, wrap=lambda optimizer: optimizer, module=linear, **options):
        self.plain = module()
        self.model = lamina.DistributedModel(copy.deepcopy(self.plain), **options)
        self.theirs = torch.optim.SGD(self.plain.parameters(), lr=0.1, momentum=0.9)
        self.ours = wrap(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    def backward(self, number=0):
        """One on both; each copy reads another part of the batch."""
        batches = [batch(10 * each + number).to(self.plain[0].weight.dtype) for each in range(2)]
        self.plain(torch.cat(batches)).square().mean().backward()
        self.model(batches[RANK]).square().mean().backward()

    def step(self):
        for each in (self.theirs, self.ours):
            each.step()
            each.zero_grad()
        self.expect_same()

    def expect_same(self):
        for ours, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6), (ours, theirs)
            assert agrees(ours)


def to_float_by_data(module):
    for parameter in module.parameters():
        parameter.data = parameter.data.float()


def there_and_back(module):
    module.float().double()


def others(module):
    module[2] = nn.Linear(4, 1).double()
    module[0].bias = nn.Parameter(torch.ones_like(module[0].bias))


def other_shape(module):
    module[0].weight.data, module[2].weight.data = torch.ones(5, 6).double(), torch.ones(1, 5).double()
    module[0].bias.data = torch.ones(5).double()


def freeze_and_thaw(module):
    for on in (False, True):
        module.requires_grad_(on)


def assign(module):
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()}, assign=True)


def swapped(module):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def set_memory(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.set_(parameter.clone())


CHANGES = (
    nn.Module.float,
    there_and_back,
    to_float_by_data,
    set_memory,
    others,
    other_shape,
    freeze_and_thaw,
    assign,
    swapped,
)


def case_gradients_are_averaged_whatever_becomes_of_the_parameters():
    for change in CHANGES:
        start()
        pair = Plain()
        pair.backward()
        pair.step()
        torch.manual_seed(1)
        change(pair.plain)
        torch.manual_seed(1)
        change(pair.model if change in (nn.Module.float, there_and_back, swapped) else pair.model.module)
        for each, optimizer in ((pair.plain, pair.theirs), (pair.model, pair.ours)):
            optimizer.state.clear()
            optimizer.param_groups[0]["params"] = list(each.parameters())
        for number in (1, 2):
            pair.backward(number)
            pair.step()
        lamina.shutdown()


def case_a_step_function_averages_after_a_conversion_too():
    start()
    model = lamina.distribute(linear())

    @lamina.step
    def step(x):
        model(x).sum().backward()

    for change in (lambda: None, model.float, model.double):
        change()
        model.zero_grad()
        step(share().to(model.module[0].weight.dtype))
        assert all(agrees(parameter.grad) for parameter in model.parameters())


def case_a_part_of_the_model_that_is_converted_and_called_alone_is_averaged_before_the_update():
    start()
    model = lamina.distribute(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module.float()
    model.module(share().float()).sum().backward()
    optimizer.step()
    assert all(agrees(parameter) for parameter in model.parameters())


def case_an_update_has_what_is_left_over_of_an_accumulation():
    for wrap in (lambda optimizer: optimizer, lamina.DistributedOptimizer):
        start()
        pair = Plain(wrap, backward_passes_per_step=2)
        for epoch in range(2):
            for number in range(3):
                pair.backward(3 * epoch + number)
                if number > 0:
                    pair.step()
        pair.backward()
        for model in (pair.model, pair.plain):
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        pair.step()
        pair.backward()
        close(pair.model.grad_norm(), nn.utils.get_total_norm([each.grad for each in pair.plain.parameters()]))
        pair.step()
        lamina.shutdown()


def case_gradients_that_are_not_averaged_yet_make_no_update():
    start()
    model = lamina.distribute(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    refused = pytest.raises(lamina.UsageError, match=r"inside a .*replica-update-early")
    hook = model.module[2].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with refused:
        model(share()).sum().backward()
    hook.remove()

    @lamina.step
    def step(x):
        model.backward(model(x).sum())
        optimizer.step()

    with pytest.raises(lamina.UsageError, match=r"inside a .*replica-update-early"):
        step(share())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def case_a_plain_optimizer_may_have_parameters_beside_the_model():
    start()
    pair = Plain()
    own = [nn.Parameter(torch.ones(1).double()) for _ in range(2)]
    for parameter, optimizer in zip(own, (pair.theirs, pair.ours), strict=True):
        optimizer.add_param_group({"params": [parameter]})
    for _ in range(2):
        (pair.plain(whole()) * own[0]).square().mean().backward()
        (pair.model(share()) * own[1]).square().mean().backward()
        pair.step()
        close(*own)


def case_a_grad_scaler_unscales_the_average_of_what_is_left_over():
    for wrap, spoilt in itertools.product((lambda optimizer: optimizer, lamina.DistributedOptimizer), (False, True)):
        start()
        pair = Plain(wrap, backward_passes_per_step=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = copy.deepcopy(pair.model.state_dict())
        x = share() * (float("inf") if spoilt and RANK == 1 else 1)
        scaler.scale(pair.model(x).square().mean()).backward()
        pair.plain(whole()).square().mean().backward()
        scaler.unscale_(pair.ours)
        nn.utils.clip_grad_norm_(pair.model.parameters(), 0.1)
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
        scaler.step(pair.ours)
        scaler.update()
        assert scaler.get_scale() == (2.0 if spoilt else 4.0)
        if not spoilt:
            pair.theirs.step()
            pair.expect_same()
        else:
            assert all(torch.equal(value, before[name]) for name, value in pair.model.state_dict().items())
        lamina.shutdown()


def case_a_distributed_model_is_not_copied():
    start()
    model = lamina.distribute(linear())
    for copied in (copy.deepcopy, copy.copy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(lamina.UsageError, match=r"neither copied nor pickled.*model-copied"):
            copied(model)


def case_no_sync_leaves_gradients_here_until_the_next_backward_or_update():
    start()
    pair = Plain()
    for ends in ("backward", "step"):
        with pair.model.no_sync():
            for number in range(1 + RANK):
                pair.model(batch(number)).square().mean().backward()
        assert not agrees(next(pair.model.parameters()).grad)
        for number in (0, 0, 1):
            (pair.plain(batch(number)).square().mean() / 2).backward()
        if ends == "backward":
            pair.backward()
        pair.step()


def case_no_sync_goes_by_the_forward_as_torchs():
    start()
    model = lamina.distribute(linear())
    (weight, *_) = model.parameters()
    with model.no_sync():
        loss = model(share()).sum()
    loss.backward()
    assert not agrees(weight.grad)
    loss = model(share()).sum()
    with model.no_sync():
        loss.backward()
    assert agrees(weight.grad)


def case_no_sync_holds_back_step_functions_too():
    start()
    pair = Plain()
    step = train_step(pair.model)
    with pair.model.no_sync():
        step(share())
    assert not agrees(next(pair.model.parameters()).grad)
    step(share())
    for _ in range(2):
        pair.plain(whole()).square().mean().backward()
    pair.step()


def case_each_backward_since_the_last_update_is_to_be_scaled():
    start(microbatches=1)
    for scaled_first in (True, False):
        pair = Plain(lambda optimizer: lamina.DistributedOptimizer(optimizer, static_loss_scale=1024.0))
        model, optimizer = pair.model, pair.ours
        losses = [lambda loss: model.backward(loss), lambda loss: loss.backward()]  # noqa: B023
        for backward in losses if scaled_first else reversed(losses):
            backward(model(share()).square().mean())
        with pytest.raises(lamina.UsageError, match=r"some came from a loss.backward.*optimizer-not-scaled"):
            optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):
            pair.plain(whole()).square().mean().backward()
            model.backward(model(share()).square().mean())
        x = share().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)  # leaves nothing
        pair.step()
        for forget in (model.zero_grad, lambda: [setattr(each, "grad", None) for each in model.parameters()]):  # noqa: B023
            model(share()).sum().backward()
            forget()
            pair.plain(whole()).square().mean().backward()
            model.backward(model(share()).square().mean())
            pair.step()
        lamina.shutdown()
        start(microbatches=1)


def norm_layers():
    return seeded(lambda: nn.BatchNorm1d(6), lambda: nn.Linear(6, 1))


def case_buffers_become_those_of_the_first_copy():
    start()
    model = lamina.distribute(norm_layers())

    @lamina.step
    def step(x):
        model.backward(model(x).sum())

    step(share())
    first = norm_layers()
    for rows in batch(0).chunk(2):
        first(rows)
    for name, value in model.module.named_buffers():
        assert agrees(value)
        close(value.double(), first.get_buffer(name).double())


def case_buffers_are_left_alone_on_request():
    start()
    model = lamina.DistributedModel(norm_layers(), broadcast_buffers=False)
    model(share()).sum().backward()
    assert not agrees(model.module[0].running_mean)


def case_copies_whose_buffers_differ_in_shape_are_an_error_on_all():
    start()
    model = lamina.distribute(norm_layers())
    model.module.register_buffer("cache", torch.zeros(1 + RANK))
    with pytest.raises(lamina.UsageError, match=r"replicas of the model differ.*broadcast_buffers=False"):
        model(share()).sum().backward()


def case_without_ddp_the_copies_train_apart_and_one_warning_says_so():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start(ddp=False)
        model = lamina.distribute(linear())
        model(share()).sum().backward()
    said = [str(warning.message) for warning in caught if "train apart" in str(warning.message)]
    assert len(said) == (RANK == 0)
    assert not any(agrees(parameter.grad) for parameter in list(model.parameters())[:1])
    for axis in ("world", "mp", "dp", "pp", "tp", "rdp"):
        with pytest.raises(lamina.UsageError, match="ddp: true"):
            getattr(lamina, f"get_{axis}_process_group")()
    assert not dist.is_initialized()


def case_with_ddp_or_without_a_model_nothing_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(ddp=False)
        lamina.shutdown()
        start()
        lamina.distribute(linear())


def case_process_groups():
    start()
    for axis in ("world", "dp", "rdp"):
        assert dist.get_process_group_ranks(getattr(lamina, f"get_{axis}_process_group")()) == [0, 1]
    for axis in ("mp", "pp", "tp"):
        assert dist.get_process_group_ranks(getattr(lamina, f"get_{axis}_process_group")()) == [RANK]
    total = torch.ones(2) * (1 + RANK)
    dist.all_reduce(total, group=lamina.get_dp_process_group())
    assert total.tolist() == [3, 3]
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": RANK}, group=lamina.get_world_process_group())
    assert objects == [{"rank": 0}, {"rank": 1}]
    assert lamina.get_dp_process_group() is lamina.get_dp_process_group()
    lamina.shutdown()
    assert not dist.is_initialized()


def case_collectives_are_events_of_the_timeline():
    start()
    model = lamina.distribute(norm_layers())
    step = train_step(model)
    step(share())
    with tempfile.TemporaryDirectory() as mine:
        path = pathlib.Path(lamina.allgather(mine, lamina.WORLD)[0]) / "timeline.json"
        with lamina.timeline(path):
            step(share())
        lamina.barrier()
        rows = json.loads(path.read_text())["traceEvents"]
        lamina.barrier()
    for rank in (0, 1):
        found = [row for row in rows if row.get("cat") == "collective" and row["pid"] == rank]
        assert [row["name"] for row in found] == [
            "all_reduce DP_GROUP, reduction: averaging gradients",  # who has gradients
            "all_reduce DP_GROUP, reduction: averaging gradients",
            "broadcast DP_GROUP, reduction: broadcasting buffers",
        ]
        gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
        assert found[1]["args"]["bytes"] == gradients and all(row["dur"] > 0 for row in found)


def listens_at():
    """The addresses at which this process listens, as /proc shows them."""
    mine = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                yield fields[1].split(":")[0]


def case_ranks_that_meet_at_a_loopback_address_listen_there_alone():
    start(ddp_dist_backend="nccl")  # the device's plain backend: Gloo, which listens
    lamina.get_world_process_group()
    addresses = set(listens_at())
    assert addresses and addresses <= {"0100007F", "00000000000000000000000001000000"}
    lamina.shutdown()


def case_the_scripts_own_groups_are_used_and_stay_its_own():
    dist.init_process_group("gloo")
    start()
    assert lamina.get_world_process_group() is dist.group.WORLD
    train(linear())
    lamina.shutdown()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.destroy_process_group()


def case_groups_that_only_some_ranks_made_are_an_error():
    store = dist.HashStore()
    if RANK == 0:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    start()
    with pytest.raises(lamina.UsageError, match=r"rank 0 called .*init_process_group and rank 1 did not"):
        lamina.get_dp_process_group()
    if RANK == 0:
        dist.destroy_process_group()


def case_groups_of_another_world_are_an_error():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    start()
    with pytest.raises(lamina.UsageError, match=rf"as rank 0 of 1, but this is rank {RANK} of 2"):
        lamina.get_dp_process_group()
    dist.destroy_process_group()


def case_groups_are_not_made_inside_a_step():
    start()
    with pytest.raises(lamina.UsageError, match="inside a step function"):
        lamina.step(lambda x: lamina.get_dp_process_group())(share())


def case_a_backward_through_checkpoints_is_one_backward():
    # Last: torch keeps the store of a group that is alive now, and a next group of the script would find it.
    start()
    plain = linear()

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = copy.deepcopy(plain)

        def forward(self, x):
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=True)
            return x

    model = lamina.DistributedModel(Checkpointed(), backward_passes_per_step=2)
    for rows in whole().chunk(2):
        plain(rows).square().mean().backward()
    for rows, passes in zip(share().chunk(2), (1, 2), strict=True):
        model(rows.requires_grad_()).square().mean().backward()
        assert agrees(next(model.parameters()).grad) == (passes == 2)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close(ours.grad, theirs.grad)


def case_copies_with_fewer_batches_join_the_others():
    for batches in ([2, 4], [4, 2], [3, 3]):
        for by_everyone in (True, False):
            start()
            train_unevenly(linear(), batches, by_everyone)
            lamina.shutdown()


def case_copies_join_in_a_plain_loop_too_and_keep_their_gradients():
    start()
    model = lamina.distribute(linear())
    with model.join():
        for _ in range(1 + RANK):
            model.zero_grad()
            model(share()).square().mean().backward()
            mine = [parameter.grad.clone() for parameter in model.parameters()]
    assert all(torch.equal(parameter.grad, kept) for parameter, kept in zip(model.parameters(), mine, strict=True))
    assert not agrees(next(model.parameters()).grad)
    model.zero_grad()
    model(share()).square().mean().backward()  # after it they need each other again
    assert agrees(next(model.parameters()).grad)


def case_buffers_in_join_are_those_of_a_copy_that_trains():
    start(microbatches=1)
    model = lamina.distribute(norm_layers())
    step = train_step(model)
    with model.join():
        for _ in range(1 + 2 * RANK):
            step(share() + RANK)
    mean = next(buffer for name, buffer in model.local_named_buffers() if name.endswith("running_mean"))
    assert agrees(mean)
    count = next(buffer for name, buffer in model.local_named_buffers() if name.endswith("num_batches_tracked"))
    assert count == 3


def case_the_first_copy_that_leaves_may_be_an_error_of_all():
    start()
    model = lamina.distribute(linear())
    gone = pytest.raises(lamina.UsageError, match=r"replicas \[0\] have run out of data")
    with gone, model.join(throw_on_early_termination=True):
        for _ in range(1 + RANK):
            model(share()).square().mean().backward()
    with model.join(throw_on_early_termination=True):
        model(share()).square().mean().backward()
    with model.join(enable=False):
        model(share()).square().mean().backward()
    assert agrees(next(model.parameters()).grad)


def case_an_error_of_the_script_leaves_join_as_it_is():
    start()
    model = lamina.distribute(linear())
    with pytest.raises(KeyError), model.join():
        raise KeyError
    model(share()).square().mean().backward()
    assert agrees(next(model.parameters()).grad)


def case_a_communication_hook_makes_the_gradients():
    plain, count = linear(), 4
    start(microbatches=count)
    model = lamina.DistributedModel(copy.deepcopy(plain), bucket_cap_mb=1e-4)
    seen = []

    def hook(state, bucket):
        seen.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        assert sum(gradient.numel() for gradient in bucket.gradients()) == bucket.buffer().numel()
        return allreduce_hook(state, bucket).then(lambda future: future.value() / count)

    model.register_comm_hook(lamina.get_dp_process_group(), hook)
    train_step(model)(share())
    plain(whole()).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close(ours.grad, theirs.grad)
    assert [index for index, _, _ in seen] == list(range(len(seen))) and len(seen) > 1
    assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
    assert sum(parameters for _, _, parameters in seen) == 4
    with pytest.raises(lamina.UsageError, match="once"):
        model.register_comm_hook(None, hook)


def case_a_communication_hook_in_join_is_called_by_all():
    start()
    model = lamina.distribute(linear())
    model.register_comm_hook(None, allreduce_hook)
    with model.join():
        for _ in range(1 + RANK):
            model(share()).square().mean().backward()
    assert all(agrees(parameter) for parameter in model.parameters())


def case_a_communication_hook_that_returns_something_else_is_an_error():
    for wrong, says in (
        (lambda state, bucket: bucket.buffer(), r"returns a torch.futures.Future, not Tensor"),
        (lambda state, bucket: done("x"), "holds a tensor, not str"),
        (lambda state, bucket: done(bucket.buffer()[1:]), "the bucket's size and type"),
    ):
        start()
        model = lamina.distribute(linear())
        model.register_comm_hook(None, wrong)
        with pytest.raises(lamina.UsageError, match=says):
            model(share()).sum().backward()
        lamina.shutdown()


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def case_joining_and_hooks_need_ddp():
    start(ddp=False)
    model = lamina.distribute(linear())
    with pytest.raises(lamina.UsageError, match="needs ddp"):
        model.join().__enter__()
    with pytest.raises(lamina.UsageError, match="needs ddp"):
        model.register_comm_hook(None, allreduce_hook)


def case_a_step_that_trains_a_model_that_was_never_distributed_is_refused():
    lamina.init(ddp=True, timeout_s=60)
    model = torch.nn.Linear(2, 1)
    step = lamina.step(lambda x: model(x).sum())
    with pytest.raises(lamina.UsageError, match=r"model = lamina.distribute\(model\)") as caught:
        step(torch.ones(4, 2))
    assert caught.value.code == "model-none"
    with torch.no_grad():
        step(torch.ones(4, 2)).reduce_sum()
