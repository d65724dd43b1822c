# SPDX-License-Identifier: Apache-2.0
"""Cases for four ranks: two copies of a model that is cut into two."""

import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
from multiprocess.replicas import (
    agrees,
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
from torch.nn.utils import clip_grad_norm_, get_total_norm

import lamina
from lamina.job import lifetime

RANK = int(os.environ.get("RANK", 0))


def start(**keys):
    lamina.init(**({"partitions": 2, "ddp": True, "microbatches": 2, "timeout_s": 30} | keys))


def layers(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def everywhere(value):
    return all(lamina.allgather(value, lamina.WORLD))


def case_it_trains_like_one_process_with_the_whole_batch():
    start()
    train(layers())


def case_copies_with_batches_of_other_sizes_train_like_one_process_with_all():
    for schedule in ("simple", "interleaved", "zero_bubble"):
        start(microbatches=4, schedule=schedule)
        train_on_sizes(layers(), [[8, 8], [5, 7], [1, 6], [3, 2]])
        lamina.shutdown()


def case_it_does_so_when_the_copies_are_neighbours():
    start(placement_strategy="spread")
    train(layers())


def case_ranks_that_seeded_differently_train_alike():
    start()
    model = lamina.distribute(layers(seed=RANK))
    train_step(model)(share())
    plain = layers()
    plain(whole()).square().mean().backward()
    for name, parameter in model.local_named_parameters():
        close(parameter.grad, plain.get_parameter(name).grad)


def case_a_step_that_fails_in_one_pipeline_fails_in_all_and_the_next_is_exact():
    for placement in ("cluster", "spread"):
        start(placement_strategy=placement)
        train_past_failures(layers())
        lamina.shutdown()


class FailsOnDemand(nn.Module):
    def forward(self, x):
        if FailsOnDemand.now:
            raise KeyError("there")
        return x


def case_a_module_of_another_partition_that_fails_in_one_pipeline_ends_the_pass_of_all():
    start(auto_partition=False, default_partition=0)
    torch.manual_seed(0)  # for all ranks, whatever ran before
    module = nn.Sequential(nn.Linear(6, 1), FailsOnDemand()).double()
    lamina.set_partition(module[1], 1)
    plain = copy.deepcopy(module)
    model = lamina.distribute(module)
    step = train_step(model)
    for fails in (False, True, False):
        FailsOnDemand.now = fails and lamina.dp_rank() == 1
        model.zero_grad()
        if fails:
            with pytest.raises(KeyError, match="there"):
                step(share())
        else:
            step(share())
    FailsOnDemand.now = False
    plain(whole()).square().mean().backward()
    for name, parameter in model.local_named_parameters():
        close(parameter.grad, plain.get_parameter(name).grad)


def case_gradients_accumulate_until_the_nth_step_on_every_partition():
    start()
    model = lamina.DistributedModel(layers(), backward_passes_per_step=2)
    step = train_step(model)
    plain = layers()
    plain(share()).square().mean().backward()
    step(share())
    for name, parameter in model.local_named_parameters():
        close(parameter.grad, plain.get_parameter(name).grad)
    lamina.step(lambda x: model(x))(share())
    step(share())
    plain.zero_grad()
    for _ in range(2):
        plain(whole()).square().mean().backward()
    for name, parameter in model.local_named_parameters():
        close(parameter.grad, plain.get_parameter(name).grad)


def case_a_backward_of_the_loss_itself_is_noticed():
    start(auto_partition=False, default_partition=0)
    module = layers()
    for part in module:
        lamina.set_partition(part, 1)
    model = lamina.distribute(module)

    @lamina.step
    def step(x):
        (model(x).square().mean() / 2).backward()

    step(share())
    assert all(parameter.grad is not None and agrees(parameter.grad) for parameter in model.local_parameters())


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(6, 1, bias=False) for _ in range(4)])

    def forward(self, x, used):
        return sum(self.ways[i](x) for i in used)


def case_missing_gradients_on_a_partition_that_does_not_lead():
    start(auto_partition=False, default_partition=0)
    module = Choice().double()
    for way in module.ways:
        lamina.set_partition(way, 1)
    model = lamina.distribute(module)

    @lamina.step
    def step(x):
        model.backward(model(x, [0] if lamina.dp_rank() == 0 else [0, 1]).sum())

    step(share())
    if lamina.pp_rank() == 1:
        assert module.ways[2].weight.grad is None
        only = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).sum(0, keepdim=True)
        close(module.ways[1].weight.grad, only / 4)
        close(module.ways[0].weight.grad, whole().sum(0, keepdim=True) / 4)


def case_buffers_of_every_partition_become_those_of_the_first_copy():
    start(auto_partition=False, default_partition=0)
    module = nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
    lamina.set_partition(module[1], 1)
    model = lamina.distribute(module)
    train_step(model)(share())
    values = [value for _, value in model.local_named_buffers()]
    assert len(values) == 3 and all(agrees(value) for value in values)


def case_process_groups():
    start()
    expected = {
        "world": [0, 1, 2, 3],
        "mp": lamina.get_mp_group(),
        "dp": lamina.get_dp_group(),
        "pp": lamina.get_pp_group(),
        "tp": [RANK],
        "rdp": lamina.get_rdp_group(),
    }
    for axis, ranks in expected.items():
        group = getattr(lamina, f"get_{axis}_process_group")()
        assert dist.get_process_group_ranks(group) == ranks
        total = torch.ones(1) * RANK
        dist.all_reduce(total, group=group)
        assert total.item() == sum(ranks), axis


NORMS = (2.0, 1, 3.5, float("inf"), 0, -float("inf"), -1.5)


def case_norms_are_those_of_the_plain_model():
    start()
    module = layers()
    plain = copy.deepcopy(module)
    model = lamina.distribute(module)
    step = train_step(model)
    for kind in NORMS:
        plain.zero_grad()
        plain(whole()).square().mean().backward()
        model.module.zero_grad()
        step(share())
        expected = get_total_norm([p.grad for p in plain.parameters()], kind)
        ways = [
            get_total_norm([p.grad for p in model.parameters() if p.grad is not None], kind),
            clip_grad_norm_(model.parameters(), 1e9, kind),
            clip_grad_norm_(list(model.local_parameters()), 1e9, norm_type=kind),
            torch.nn.utils.clip_grad_norm_((p for p in model.parameters()), 1e9, kind, foreach=False),
            model.clip_grad_norm_(1e9, kind),
            model.clip_grad_norm_(0.01, kind),
        ]
        for norm in ways:
            close(norm, expected)
            assert agrees(norm) and everywhere(norm.item() == lamina.allgather(norm, lamina.PP_GROUP)[0].item())
        clip_grad_norm_(list(plain.parameters()), 0.01, kind)
        for name, parameter in model.local_named_parameters():
            close(parameter.grad, plain.get_parameter(name).grad)
    close(get_total_norm(model.parameters()), get_total_norm(plain.parameters()))
    twice = [clip_grad_norm_([*each.parameters(), *each.parameters()], 0.01) for each in (model, plain)]
    close(*twice)
    assert get_total_norm([torch.ones(3)], 0).item() == get_total_norm([], -1).item() + 1 == 1


def case_gradients_of_one_partition_alone_count_on_all():
    start()
    model = lamina.distribute(layers())
    train_step(model)(share())
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        alone = [parameter for other, parameter in model.named_parameters() if other == name]
        norm = clip_grad_norm_(alone, 1e9)
        assert norm > 0 and everywhere(norm.item() == lamina.allgather(norm, lamina.PP_GROUP)[0].item())
    model.module.zero_grad()
    assert clip_grad_norm_(model.parameters(), 1.0) == 0


def case_other_tensors_count_in_norms_as_on_the_rank_that_leads():
    start()
    model = lamina.distribute(layers())
    train_step(model)(share())
    other = nn.Linear(2, 1).double()
    other(torch.ones(2).double() * (1 + RANK)).sum().backward()
    if RANK == 1:  # not collective
        close(clip_grad_norm_(other.parameters(), 1e9), torch.tensor(9.0).double().sqrt())
    both = clip_grad_norm_([*model.parameters(), *other.parameters()], 1e9)
    own = clip_grad_norm_(model.parameters(), 1e9)
    leading = lamina.allgather(RANK, lamina.PP_GROUP)[0]
    close(both.square(), own.square() + 2 * (1 + leading) ** 2 + 1)


def case_a_norm_that_is_not_finite_is_an_error_on_every_rank():
    start()
    model = lamina.distribute(layers())
    train_step(model)(share() * (float("inf") if RANK < 2 else 1))
    with pytest.raises(RuntimeError, match="non-finite"):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert not model.clip_grad_norm_(1.0).isfinite()


def case_norms_are_not_taken_inside_a_step():
    start()
    model = lamina.distribute(layers())

    @lamina.step
    def step(x):
        model.backward(model(x).sum())
        clip_grad_norm_(model.parameters(), 1.0)

    with pytest.raises(lamina.UsageError, match="the norm of gradients inside a step function"):
        step(share())


def case_after_shutdown_norms_are_torchs_again():
    start()
    model = lamina.distribute(layers())
    train_step(model)(share())
    lamina.shutdown()
    if RANK == 0:
        clip_grad_norm_([parameter for parameter in model.parameters() if parameter.grad is not None], 1.0)


def case_copies_with_fewer_batches_join_the_others():
    for batches in ([2, 4], [3, 1]):
        start()
        train_unevenly(layers(), batches)
        lamina.shutdown()


def case_a_communication_hook_makes_the_gradients_of_every_partition():
    plain = layers()
    start()
    model = lamina.distribute(copy.deepcopy(plain))

    def hook(state, bucket):
        return allreduce_hook(state, bucket).then(lambda future: future.value() / 2)

    model.register_comm_hook(lamina.get_dp_process_group(), hook)
    train_step(model)(share())
    plain(whole()).square().mean().backward()
    for name, parameter in model.local_named_parameters():
        close(parameter.grad, plain.get_parameter(name).grad)
    lamina.shutdown()


def case_a_copy_without_any_batch_says_so():
    start()
    model = lamina.distribute(layers())
    if lamina.dp_rank() == 0:
        with pytest.raises(lamina.UsageError, match=r"made no step; .* \[replica-no-step\]"), model.join():
            pass
    else:
        with pytest.raises(lamina.Error):
            train_step(model)(share())


def case_a_step_that_begins_after_the_other_copy_has_left_leaves_no_thread_behind():
    start()
    model = lamina.distribute(layers())
    if lamina.dp_rank() == 0:
        return

    @lamina.step
    def step(x):
        time.sleep(0.5)  # the others' leaving fails the step before the model is called, and cut
        return model(x)

    with pytest.raises(lamina.PeerError):
        step(share())
    lamina.shutdown()
    assert not lifetime._stuck


class TwoResults(nn.Module):
    """The second result depends on the first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4).double()

    def forward(self, x):
        hidden = self.layer(x)
        return hidden, hidden.square().mean()


def case_a_model_that_lives_on_another_rank_may_return_results_that_depend_on_each_other():
    start(auto_partition=False, default_partition=1)
    plain = TwoResults()
    model = lamina.distribute(copy.deepcopy(plain))

    @lamina.step
    def step(x):
        _, loss = model(x)
        loss.backward()
        return loss

    for _ in range(3):
        model.zero_grad()
        step(share())
    (2 * plain(whole())[1]).backward()  # loss.backward() does not average over the two microbatches
    for name, parameter in model.local_named_parameters():
        close(parameter.grad, plain.get_parameter(name).grad)
