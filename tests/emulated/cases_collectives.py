# SPDX-License-Identifier: Apache-2.0
"""Collectives of two ranks, each with a device of its own."""

import datetime
import os
import time

import emulated
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
LONG_S = 120  # until a wait for a rank is given up: longer than a test


def joined(rank, path):
    """Makes the group; the rank's number and its device."""
    rank = int(rank)
    assert dist.get_default_backend_for_device("emulated") == "emulatedccl"
    torch.accelerator.set_device_index(rank)
    store = dist.FileStore(path, RANKS)
    limit = datetime.timedelta(seconds=LONG_S)
    dist.init_process_group("cpu:gloo,emulated:emulatedccl", store=store, rank=rank, world_size=RANKS, timeout=limit)
    return rank, torch.device("emulated", rank)


def filled(value, device, size=4):
    return torch.full((size,), float(value), device=device)


def values(tensor):
    return tensor.cpu().tolist()


def each_collective_is_right(rank, path):
    rank, device = joined(rank, path)
    own, sizes = filled(rank + 1, device), [1, 3] if rank == 0 else [2, 2]
    for operation, result in ((dist.ReduceOp.SUM, 3), (dist.ReduceOp.AVG, 1.5), (dist.ReduceOp.MAX, 2)):
        dist.all_reduce(x := own.clone(), operation)
        assert values(x) == [result] * 4
    dist.broadcast(x := own.clone(), 1)
    assert values(x) == [2] * 4
    dist.reduce(x := own.clone(), 0)
    assert rank == 1 or values(x) == [3] * 4

    dist.all_gather(parts := [torch.empty_like(own) for _ in range(RANKS)], own)
    assert values(torch.cat(parts)) == [1] * 4 + [2] * 4
    dist.all_gather_into_tensor(x := torch.empty(8, device=device), own)
    assert values(x) == [1] * 4 + [2] * 4
    dist.gather(own, parts if rank == 0 else None, 0)
    assert values(torch.cat(parts)) == [1] * 4 + [2] * 4
    dist.scatter(x := torch.empty_like(own), [own, own * 2] if rank == 0 else None, 0)
    assert values(x) == [rank + 1] * 4

    dist.reduce_scatter(x := torch.empty_like(own), [own, own * 2])
    assert values(x) == [3 * (rank + 1)] * 4
    dist.reduce_scatter_tensor(x := torch.empty(2, device=device), own, dist.ReduceOp.AVG)
    assert values(x) == [1.5] * 2

    dist.all_to_all_single(x := torch.empty_like(own), own)
    assert values(x) == [1, 1, 2, 2]
    x = torch.empty(3 if rank == 0 else 5, device=device)
    dist.all_to_all_single(x, own, [1, 2] if rank == 0 else [3, 2], sizes)
    assert values(x) == ([1, 2, 2] if rank == 0 else [1, 1, 1, 2, 2])
    dist.all_to_all(parts := [torch.empty(2, device=device) for _ in range(RANKS)], list(own.chunk(2)))
    assert values(torch.cat(parts)) == [1, 1, 2, 2]

    if rank == 0:
        dist.send(own, 1)
        dist.recv(x := torch.empty_like(own), 1)
    else:
        dist.recv(x := torch.empty_like(own), 0)
        dist.send(own, 0)
    assert values(x) == [2 - rank] * 4
    exchanges = [dist.P2POp(dist.isend, own, 1 - rank), dist.P2POp(dist.irecv, x.zero_(), 1 - rank)]
    for work in dist.batch_isend_irecv(exchanges):
        work.wait()
    assert values(x) == [2 - rank] * 4
    many_at_once(rank, device)
    dist.destroy_process_group()


def many_at_once(rank, device):
    with dist._coalescing_manager(device=device, async_ops=True) as together:
        for x in (tensors := [filled(rank + i, device) for i in range(3)]):
            dist.all_reduce(x)
    together.wait()
    assert [values(x)[0] for x in tensors] == [1, 3, 5]
    outputs = [torch.empty(2, device=device) for _ in range(2)]
    with dist._coalescing_manager(device=device):
        for i, x in enumerate(outputs):
            dist.all_gather_into_tensor(x, filled(rank + 5 * i, device, 1))
    assert [values(x) for x in outputs] == [[0, 1], [5, 6]]
    outputs = [torch.empty(1, device=device) for _ in range(2)]
    with dist._coalescing_manager(device=device):
        for i, x in enumerate(outputs):
            dist.reduce_scatter_tensor(x, filled(rank + 5 * i, device, 2))
    assert [values(x) for x in outputs] == [[1], [11]]
    dist.all_gather_object(objects := [None] * RANKS, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]


def a_wait_orders_streams(rank, path):
    """With delays. The host waits for nothing; without Work.wait() the numbers would be too early."""
    rank, device = joined(rank, path)
    wrong = 0
    for _ in range(10):
        x = filled(rank + 1, device, 1000)
        for _ in range(3):
            x = x * 1.0
        emulated.reset_counts()
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future()
        assert future.done()
        work.wait()
        y = future.wait()[0] + 1
        assert emulated.counts()["waits"] == 0
        wrong += not bool((y.cpu() == 4).all())
    assert (wrong > 0) == (os.environ.get("EMULATED_IGNORE") == "waits"), wrong
    emulated.reset_counts()
    dist.group.WORLD._get_backend(device).barrier(dist.BarrierOptions()).wait()
    assert emulated.counts()["waits"] == 1  # as with NCCL
    dist.destroy_process_group()


def replicas_train(rank, path):
    rank, device = joined(rank, path)
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).eval()
    x = torch.randn(RANKS, 3, 4)
    whole(x.flatten(0, 1)).pow(2).mean().backward()
    expected = [parameter.grad.clone() for parameter in whole.parameters()]
    replica = DistributedDataParallel(whole.to(device))
    replica.zero_grad()
    for _ in range(2):
        replica.zero_grad()
        replica(x[rank].to(device)).pow(2).mean().backward()
    gradients = [parameter.grad.cpu() for parameter in replica.parameters()]
    torch.testing.assert_close(gradients, expected)
    dist.destroy_process_group()


def an_absent_member_is_waited_for_until_an_abort(rank, path):
    rank, device = joined(rank, path)
    dist.all_reduce(filled(1, device))
    if rank == 1:
        dist.recv(torch.empty(1), 0)  # until the other has seen that I am absent
        return
    x = filled(5, device)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    later = torch.Event("emulated")
    later.record()
    time.sleep(0.3)
    assert not work.is_completed() and not later.query()
    dist.group.WORLD._get_backend(device).abort()
    later.synchronize()
    assert not work.is_success()
    assert values(filled(2, device)) == [2] * 4  # the device goes on
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        assert "aborted" in str(error), error
    else:
        raise AssertionError("an aborted group took a collective")
    dist.send(torch.empty(1), 1)


def a_lost_member_leaves_the_others_spinning(rank, path):
    rank, device = joined(rank, path)
    dist.all_reduce(filled(1, device))
    torch.accelerator.synchronize()
    if rank == 1:
        os._exit(0)
    work = dist.all_reduce(filled(1, device), async_op=True)
    receipt = dist.irecv(filled(1, device), 1)
    time.sleep(0.5)
    assert not work.is_completed() and not receipt.is_completed()
    # And so the process ends: nothing hangs.
