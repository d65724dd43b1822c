# SPDX-License-Identifier: Apache-2.0
"""`ddp` with a world of one, and what is refused before anything starts."""

import copy
import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

import lamina

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def with_ddp():
    lamina.init(ddp=True, microbatches=2)


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_process_has_all_groups(with_ddp):
    for axis in ("world", "mp", "dp", "pp", "tp", "rdp"):
        group = getattr(lamina, f"get_{axis}_process_group")()
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert (group.size(), total.item()) == (1, 1)
    lamina.shutdown()
    assert not dist.is_initialized()


def test_process_groups_need_ddp():
    lamina.init()
    with pytest.raises(lamina.UsageError, match="ddp: true"):
        lamina.get_dp_process_group()


def test_process_groups_need_init():
    with pytest.raises(lamina.UsageError, match="init"):
        lamina.get_world_process_group()


def test_it_trains_as_without(with_ddp):
    module = nn.Linear(4, 1)
    plain = copy.deepcopy(module)
    model = lamina.DistributedModel(module, backward_passes_per_step=2)
    plain(X).sum().backward()
    model(X).sum().backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)


def test_a_model_whose_hook_knows_it_goes_with_its_job(with_ddp):
    model = lamina.DistributedModel(nn.Linear(4, 1))

    def hook(state, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer() * len(list(model.parameters())))
        return done

    model.register_comm_hook(None, hook)
    model(X).sum().backward()
    gone = weakref.ref(model.module)
    lamina.shutdown()
    model = hook = None
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_gradients_are_clipped_as_torch_does(start, kind):
    module = nn.Linear(4, 1)
    plain = copy.deepcopy(module)
    model = lamina.DistributedModel(module)
    for one in (model, plain):
        one(X).sum().backward()
    assert torch.equal(model.clip_grad_norm_(0.1, kind), clip_grad_norm_(plain.parameters(), 0.1, kind))
    assert torch.equal(module.weight.grad, plain.weight.grad)


def test_gradients_are_not_clipped_inside_a_step(start):
    model = lamina.DistributedModel(nn.Linear(4, 1))
    with pytest.raises(lamina.UsageError, match=r"clip_grad_norm_\(\) was called inside a step"):
        lamina.step(lambda x: model.clip_grad_norm_(1.0))(X)


@pytest.mark.parametrize(
    "option, text",
    [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step is an integer, at least 1, not 0"),
        ({"backward_passes_per_step": 1.5}, "not 1.5"),
        ({"backward_passes_per_step": True}, "not True"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb is a number above 0, not 0"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb is a number above 0, not '25'"),
        ({"average_grads_across_microbatches": "x"}, "average_grads_across_microbatches is True or False, not 'x'"),
        ({"average_grads_across_microbatches": 0}, "average_grads_across_microbatches is True or False, not 0"),
        ({"overlapping_allreduce": None}, "overlapping_allreduce is True or False, not None"),
        ({"trace_execution_times": "no"}, "trace_execution_times is True or False, not 'no'"),
        ({"trace_memory_usage": "no"}, "trace_memory_usage is True or False, not 'no'"),
        ({"broadcast_buffers": 1}, "broadcast_buffers is True or False, not 1"),
        ({"gradient_as_bucket_view": 1}, "gradient_as_bucket_view is True or False, not 1"),
        ({"find_unused_parameters": 1}, "find_unused_parameters is True or False, not 1"),
    ],
)
def test_options_that_make_no_sense(start, option, text):
    with pytest.raises(lamina.UsageError, match=text):
        lamina.DistributedModel(nn.Linear(1, 1), **option)


def test_a_model_in_or_around_torchs_wrapper_is_refused(start, world_of_one):
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    with pytest.raises(lamina.UsageError, match=r"the model is a Dist.*give its `\.module`") as caught:
        lamina.DistributedModel(wrapped)
    assert caught.value.code == "model-wrapped"
    with pytest.raises(lamina.UsageError, match=r"`1` in the model is a Dist.*put `1\.module`"):
        lamina.DistributedModel(nn.Sequential(nn.Linear(1, 1), wrapped))


def test_a_model_in_fsdp_is_refused(start, world_of_one):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    with pytest.raises(lamina.UsageError, match="the model is a FullyShardedDataParallel of torch's"):
        lamina.DistributedModel(FullyShardedDataParallel(nn.Linear(1, 1), device_id=torch.device("cpu")))
    with pytest.raises(lamina.UsageError, match=r"`0` in the model is a FSDPLinear of torch's.*without that"):
        lamina.DistributedModel(nn.Sequential(fully_shard(nn.Linear(1, 1))))


def test_importing_lamina_does_not_import_fsdp():
    program = "import sys, lamina; assert 'torch.distributed.fsdp' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_backward_beside_the_scaled_one_is_an_error_of_the_step(start):
    model = lamina.DistributedModel(nn.Linear(4, 1))
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=1024.0)
    before = model.module.weight.detach().clone()
    model.backward(model(X).sum())
    (model(X).sum() + model.module.weight.sum()).backward()
    with pytest.raises(lamina.UsageError, match=r"some came from a loss.backward.*optimizer-not-scaled"):
        optimizer.step()
    assert torch.equal(model.module.weight, before)
    optimizer.zero_grad()
    model.backward(model(X).sum())
    optimizer.step()
    torch.testing.assert_close(model.module.weight.detach(), before - 0.1 * X.sum(0, keepdim=True))


def test_no_sync_of_one_replica_does_nothing(start):
    model = lamina.DistributedModel(nn.Linear(4, 1))
    with model.no_sync():
        model(X).sum().backward()
    assert torch.equal(model.module.weight.grad, X.sum(0, keepdim=True))
