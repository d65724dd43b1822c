# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over the backend "lamina": what torch itself builds on it, on four ranks."""

import concurrent.futures
import contextlib
import functools
import gc
import itertools
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import lamina

RANK = int(os.environ.get("RANK", "0"))
SIZE = int(os.environ.get("WORLD_SIZE", "1"))


worlds = itertools.count()


@functools.cache
def store() -> dist.Store:
    """One for all cases: of two, one after the other at one address, a late rank may meet the first."""
    return next(rendezvous("env://"))[0]


@contextlib.contextmanager
def world(backend="lamina", timeout_s=60.0, name=None):
    own = dist.PrefixStore(name or f"world {next(worlds)}", store())
    dist.init_process_group(backend, store=own, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=timeout_s))
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2 * SIZE, 6, generator=generator, dtype=torch.float64) for _ in range(5)]


def trained(spread, rows=slice(None)) -> dict[str, torch.Tensor]:
    """The parameters after five steps of `spread(model())`, on these rows of each batch."""
    net = spread(model())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for batch in batches():
        net(batch[rows]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("module."): whole(value.detach()) for name, value in net.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def expect_as_on_one(spread) -> None:
    alone = trained(lambda net: net)
    for name, value in trained(spread, slice(2 * RANK, 2 * RANK + 2)).items():
        torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-12, msg=name)


def case_groups_are_made_by_its_name():
    for backend in ("lamina", "cpu:lamina"):
        with world(backend):
            assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == "lamina"
            total = torch.full((3,), RANK)
            dist.all_reduce(total)
            assert total.tolist() == [SIZE * (SIZE - 1) // 2] * 3


def case_ddp_trains_as_one_device():
    with world():
        expect_as_on_one(DistributedDataParallel)


def case_ddp_trains_as_one_device_with_small_buckets_and_views():
    with world():
        expect_as_on_one(lambda net: DistributedDataParallel(net, bucket_cap_mb=0.0001, gradient_as_bucket_view=True))


def case_ddp_averages_sparse_gradients():
    with world():
        torch.manual_seed(0)
        table = DistributedDataParallel(nn.Embedding(SIZE + 2, 2, sparse=True))
        table(torch.tensor([RANK, SIZE, SIZE])).sum().backward()
        gradient = table.module.weight.grad
        assert gradient.is_sparse and gradient.coalesce().indices().tolist() == [list(range(SIZE + 1))]
        right = torch.full((SIZE + 2, 2), 1 / SIZE)
        right[SIZE], right[SIZE + 1] = 2.0, 0.0
        assert torch.equal(gradient.to_dense(), right)


def case_fsdp_trains_as_one_device():
    with world():
        mesh = init_device_mesh("cpu", (SIZE,))

        def spread(net):
            for layer in net[::2]:
                fully_shard(layer, mesh=mesh)
            return fully_shard(net, mesh=mesh)

        expect_as_on_one(spread)


def case_fsdp_over_two_axes_trains_as_one_device():
    with world():
        mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("replica", "shard"))
        expect_as_on_one(lambda net: fully_shard(net, mesh=mesh))


def case_fsdp_trains_as_one_device_in_memory_of_the_group():
    with world():
        mesh = init_device_mesh("cpu", (SIZE,))

        def spread(net):
            net = fully_shard(net, mesh=mesh)
            net.set_allocate_memory_from_process_group_for_comm(True)
            return net

        expect_as_on_one(spread)


def case_tensors_of_the_group_go_through_collectives_and_outlive_it():
    with world():
        cpu = torch.device("cpu")
        backend = dist.group.WORLD._get_backend(cpu)
        mine = backend.allocate_tensor(100_000, dtype=torch.float32, device=cpu)
        whole = torch.empty(SIZE * len(mine))
        for step in range(20):
            mine.fill_(step * SIZE + RANK)
            dist.all_gather_single(whole, mine)
            mine.fill_(-1)
            expected = torch.arange(step * SIZE, step * SIZE + SIZE, dtype=torch.float32)
            assert torch.equal(whole, expected.repeat_interleave(len(mine)))
        del backend
    assert mine.add_(1).eq(0).all()


def case_a_hook_that_waits_for_more_collectives_trains():
    """PowerSGD starts collectives where others end, and waits for them."""
    with world():
        net = DistributedDataParallel(model())
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for batch in batches():
            net(batch[2 * RANK : 2 * RANK + 2]).square().mean().backward()
        others = [torch.empty_like(net.module[0].weight) for _ in range(SIZE)]
        dist.all_gather(others, net.module[0].weight.grad)
        assert all(torch.equal(other, others[0]) for other in others)


def case_gradients_in_float16_are_averaged():
    with world():
        net = DistributedDataParallel(model().float())
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
        net(batches()[0][2 * RANK : 2 * RANK + 2].float()).square().mean().backward()
        alone = model().float()
        alone(batches()[0].float()).square().mean().backward()
        torch.testing.assert_close(net.module[0].weight.grad, alone[0].weight.grad, rtol=0.02, atol=1e-3)


def case_zero_trains_as_one_device():
    with world():
        alone = trained(lambda net: net)
        net = DistributedDataParallel(model())
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
        for batch in batches():
            net(batch[2 * RANK : 2 * RANK + 2]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in net.module.named_parameters():
            torch.testing.assert_close(value.detach(), alone[name], rtol=1e-9, atol=1e-12)


def case_dtensors_change_their_placements():
    with world():
        mesh = init_device_mesh("cpu", (2, SIZE // 2))
        tensor = torch.arange(60.0).view(6, 10)
        spread = distribute_tensor(tensor, mesh, [Shard(0), Shard(1)])
        for placements in ([Replicate(), Shard(0)], [Shard(1), Replicate()], [Shard(1), Shard(1)]):
            spread = spread.redistribute(placements=placements)
            assert torch.equal(spread.full_tensor(), tensor)
        assert torch.equal((spread @ spread.t()).full_tensor(), tensor @ tensor.t())


def case_objects_go_through_every_collective():
    with world():
        mine = {"rank": RANK, "text": "x" * (1000 * RANK)}
        everybody = [{"rank": rank, "text": "x" * (1000 * rank)} for rank in range(SIZE)]
        objects = [None] * SIZE
        dist.all_gather_object(objects, mine)
        assert objects == everybody
        objects = [None] * SIZE if RANK == 1 else None
        dist.gather_object(mine, objects, dst=1)
        assert RANK != 1 or objects == everybody
        objects = [mine] if RANK == 2 else [None]
        dist.broadcast_object_list(objects, src=2)
        assert objects == [everybody[2]]
        objects = [None]
        dist.scatter_object_list(objects, everybody if RANK == 0 else None, src=0)
        assert objects == [mine]


def case_sends_go_round_in_one_batch():
    with world():
        given, taken = torch.full((1000,), float(RANK)), torch.empty(1000)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, given, (RANK + 1) % SIZE), dist.P2POp(dist.irecv, taken, (RANK - 1) % SIZE),
        ])  # fmt: skip
        for work in works:
            work.wait()
        assert torch.equal(taken, torch.full((1000,), float((RANK - 1) % SIZE)))


def case_several_groups_work_at_once():
    with world():
        groups = [dist.new_group([rank, (rank + 1) % SIZE]) for rank in range(SIZE)]
        mine = [(i, group) for i, group in enumerate(groups) if RANK in (i, (i + 1) % SIZE)]
        for _ in range(20):
            tensors = [torch.full((5000,), float(RANK)) for _ in mine]
            works = [
                dist.all_reduce(tensor, group=group, async_op=True)
                for tensor, (_, group) in zip(tensors, mine, strict=True)
            ]
            total = torch.ones(100)
            dist.all_reduce(total)
            for work, tensor, (first, _) in zip(works, tensors, mine, strict=True):
                work.wait()
                assert tensor[0].item() == first + (first + 1) % SIZE
            assert total[0].item() == SIZE


def case_calls_that_differ_are_shown_on_all_ranks():
    with world():
        with pytest.raises(lamina.DesyncError, match="all_reduce of 3 float32, sum") as caught:
            dist.all_reduce(torch.ones(3 if RANK != 2 else 4))
        assert "rank 2" in str(caught.value) and "all_reduce of 4 float32" in str(caught.value)
        dist.barrier()


def case_a_rank_that_does_not_come_is_named():
    with world(timeout_s=20.0):
        group = dist.new_group(timeout=timedelta(seconds=3))
        if RANK == 3:
            time.sleep(4)
        with pytest.raises(lamina.Error, match="rank 3 has not come for 3 s"):
            dist.barrier(group)
        dist.barrier(group)


def case_an_interrupt_ends_a_wait_and_the_group_goes_on():
    class AlarmError(Exception):
        pass

    def ring(_signal, _frame):
        raise AlarmError

    with world():
        if RANK == 0:
            before = signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 1)
            with pytest.raises(AlarmError):
                dist.all_reduce(torch.ones(3))
            signal.signal(signal.SIGALRM, before)
        else:
            time.sleep(2)
            with pytest.raises(lamina.CancelledError, match="rank 0 gave up all_reduce of 3 float32, sum"):
                dist.all_reduce(torch.ones(3))
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total[0].item() == SIZE


def case_groups_are_made_again_under_the_same_names():
    for _ in range(5):
        with world(name="again"):
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == SIZE


def case_a_group_is_destroyed_where_a_collective_ends():
    """By the last that knows of it."""
    with world():
        groups, total = [dist.new_group()], torch.ones(1000)
        ended = (
            dist.all_reduce(total, group=groups[0], async_op=True)
            .get_future()
            .then(lambda done: dist.destroy_process_group(groups.pop()) or done.value())
        )
        assert ended.wait()[0][0].item() == SIZE


def case_a_receipt_says_from_whom():
    with world():
        if RANK == 0:
            taken = torch.empty(10)
            sources = {dist.recv(taken) for _ in range(SIZE - 1)}
            assert sources == set(range(1, SIZE))
        else:
            dist.send(torch.full((10,), float(RANK)), 0)


def case_a_rank_does_its_part_though_it_destroys_the_group_at_once():
    """The others come when it has begun both operations."""
    with world():
        group, told = dist.new_group(), dist.new_group()
        large = torch.ones(500_000)
        if RANK == 0:
            works = [dist.all_reduce(large.clone(), group=group, async_op=True) for _ in range(2)]
            dist.barrier(told)
            dist.destroy_process_group(group)
            del group, works
            gc.collect()
        else:
            dist.barrier(told)
            for _ in range(2):
                total = large.clone()
                dist.all_reduce(total, group=group)
                assert total.sum().item() == SIZE * len(total)


def case_a_forked_child_is_refused_and_its_end_is_no_ones():
    with world():
        total = torch.ones(10)
        work = dist.all_reduce(total, async_op=True) if RANK == 0 else None
        if RANK == 0:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    for call in (lambda: dist.all_reduce(torch.ones(3)), work.wait):
                        with pytest.raises(lamina.UsageError, match=r"in a child of fork\(\)"):
                            call()
                    dist.destroy_process_group()
                    gc.collect()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            dist.barrier(dist.new_group())
            work.wait()
        else:
            dist.barrier(dist.new_group())
            dist.all_reduce(total)
        assert total[0].item() == SIZE


def case_a_profile_ends_while_operations_run():
    with world():
        told = dist.new_group()
        for _ in range(10):
            tensor = torch.ones(10)
            if RANK == 0:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
                assert sum(event.name == "lamina:all_reduce" for event in profile.events()) == 3
                del profile
                gc.collect()
                dist.barrier(told)
                for work in works:
                    work.wait()
            else:
                dist.barrier(told)
                for _ in range(3):
                    dist.all_reduce(tensor)
            assert tensor[0].item() == SIZE**3


def case_a_tensor_without_memory_is_refused():
    with world():
        freed = torch.ones(1000)
        freed.untyped_storage().resize_(0)
        for call in (dist.all_reduce, dist.broadcast):
            with pytest.raises(lamina.UsageError, match="one whose storage was freed"):
                call(freed, *([0] if call is dist.broadcast else []))


def case_threads_use_groups_of_their_own_at_once():
    with world():
        groups = [dist.new_group() for _ in range(2)]

        def work(number):
            for count in range(1, 200):
                total = torch.full((count * 50,), float(RANK + number))
                dist.all_reduce(total, group=groups[number])
                assert total.sum().item() == len(total) * (SIZE * number + SIZE * (SIZE - 1) / 2)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(work, range(2)))
