# SPDX-License-Identifier: Apache-2.0
"""lamina.dist on two ranks, one of which fails where the other one waits."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lamina
from lamina import dist

FOLDER = Path(os.environ.get("DIR", "."))  # the tests only list the cases


def start():
    dist.initialize_dist("cpu", timeout=60)
    return dist.get_global_rank()


def case_ranks_are_those_of_the_launcher():
    rank = start()
    assert rank == int(os.environ["RANK"]) == dist.get_local_rank()
    assert (dist.get_world_size(), dist.get_local_world_size(), dist.get_node_rank()) == (2, 2, 0)
    assert dist.get_world_size(torch.distributed.group.WORLD) == 2


def case_collectives():
    rank = start()
    tensor = torch.tensor([rank + 1.0, 5.0])
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0, 10.0]
    dist.all_reduce(tensor := torch.tensor([rank]), "max")
    assert tensor.item() == 1
    dist.broadcast(tensor := torch.tensor([rank]), 1)
    assert tensor.item() == 1
    assert [each.tolist() for each in dist.all_gather(torch.full((2, 2), rank).t())] == [[[0, 0]] * 2, [[1, 1]] * 2]
    assert dist.all_gather_object(("rank", rank)) == [("rank", 0), ("rank", 1)]
    dist.broadcast_object_list(objects := [rank, str(rank)], src=1)
    assert objects == [1, "1"]
    dist.barrier()


def case_local_rank_0_goes_first():
    rank, file = start(), FOLDER / "made-first"
    with dist.run_local_rank_zero_first():
        assert file.exists() == (rank == 1)
        file.touch()


def case_nobody_hangs_when_local_rank_0_raises():
    rank = start()
    with pytest.raises(KeyError, match="no such file") as caught, dist.run_local_rank_zero_first():
        assert rank == 0, "the other one does not run the body"
        raise KeyError("no such file")
    assert isinstance(caught.value, lamina.RemoteError) == (rank == 1)
    if rank == 1:
        assert caught.value.rank == 0 and "raise KeyError" in caught.value.remote_traceback
    dist.barrier()


def case_nobody_hangs_when_another_rank_raises():
    rank, raised = start(), False
    try:
        with dist.run_local_rank_zero_first():
            if rank == 1:
                raise KeyError("mine")
    except KeyError:
        raised = True
    assert raised == (rank == 1)
    dist.barrier()


def _busy_wait(fails):
    rank, done = start(), FOLDER / f"done-{fails}"
    with dist.busy_wait_for_local_rank_zero(str(FOLDER / "signals")):
        if rank == 0:
            done.touch()
    assert done.exists()
    with pytest.raises(OSError, match="disk") as caught, dist.busy_wait_for_local_rank_zero(str(FOLDER / "signals")):
        if rank == fails:
            raise OSError("disk")
    assert isinstance(caught.value, lamina.RemoteError) == (rank != fails)
    dist.barrier()
    assert not list((FOLDER / "signals").iterdir())


def case_a_busy_wait_ends_when_local_rank_0_raises():
    _busy_wait(0)


def case_a_busy_wait_ends_when_another_rank_raises():
    _busy_wait(1)


def case_a_file_is_waited_for_until_it_is_there_or_local_rank_0_has_failed():
    rank = start()
    with dist.local_rank_zero_download_and_wait(str(FOLDER / "data")):
        assert (FOLDER / "data").exists() == (rank == 1)
        (FOLDER / "data").touch()
    expected = RuntimeError if rank == 0 else lamina.PeerError
    with pytest.raises(expected, match="no space"), dist.local_rank_zero_download_and_wait(str(FOLDER / "never")):
        raise RuntimeError("no space")
    dist.barrier()


def case_a_rank_that_does_not_come_is_a_timeout_error():
    rank = start()
    group = torch.distributed.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(lamina.TimeoutError, match=r"\[rank 0/2\] all_gather_object\(\): "):
            dist.all_gather_object(rank, group)
    dist.barrier()
    torch.distributed.destroy_process_group(group)


def case_lamina_starts_beside_it_and_its_sampler_counts_replicas():
    start()
    data = TensorDataset(torch.arange(5))
    assert dist.get_sampler(data).num_replicas == 2
    lamina.init(partitions=2)
    assert list(dist.get_sampler(data, exact=True)) == [0, 1, 2, 3, 4], "both ranks train one copy of the model"
    dist.require_distributed_sampler(DataLoader(data))
    dist.barrier()


def _train(ranks, rank, size, exact=True):
    """The weights after three epochs on 33 samples."""
    torch.manual_seed(1)
    x = torch.randn(33, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    model = nn.Linear(3, 1)
    trained = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    sampler = dist.get_sampler(data, shuffle=True, num_replicas=ranks, rank=rank, exact=exact)
    loader = DataLoader(data, batch_size=size, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (inputs, targets), weight in dist.exact_batches(loader) if exact else ((batch, 1.0) for batch in loader):
            optimizer.zero_grad()
            (weight * nn.functional.mse_loss(trained(inputs), targets)).backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def case_space_and_time_are_the_same_where_the_data_does_not_divide():
    rank = start()
    alone = _train(1, 0, 8)
    assert torch.allclose(_train(2, rank, 4), alone, atol=1e-6)
    assert not torch.allclose(_train(2, rank, 4, exact=False), alone, atol=1e-3), "the usual sampler repeats a sample"


def case_without_the_group_collectives_say_what_to_call():
    start()
    torch.distributed.destroy_process_group()
    assert not dist.is_initialized()
    with pytest.raises(lamina.UsageError, match=r"call lamina\.dist\.initialize_dist"):
        dist.barrier()
