# SPDX-License-Identifier: Apache-2.0
"""Which samples ranks read, with which weight: see [Note: equivalence of space and time]."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lamina
from lamina import dist

COUNTS = [(33, 2, 4), (33, 2, 5), (7, 3, 2), (9, 4, 1), (32, 2, 4), (3, 3, 5), (10, 4, 3)]  # samples, ranks, batch size


def data(count):
    return TensorDataset(torch.arange(count))


def loader(count, ranks, rank, size, **sampling):
    sampler = dist.get_sampler(data(count), num_replicas=ranks, rank=rank, exact=True, **sampling)
    sampler.set_epoch(1)
    return DataLoader(data(count), batch_size=size, sampler=sampler)


def batches(*arguments, **sampling):
    return [(batch[0].tolist(), weight) for batch, weight in dist.exact_batches(loader(*arguments, **sampling))]


def rows(count, ranks, rank, size, **sampling):
    return batches(count, ranks, rank, size, batch_size=size, **sampling)


@pytest.mark.parametrize("count, ranks, size", [(33, 2, 4), (33, 2, 16), (13, 3, 4), (32, 2, 4), (3, 3, 1), (10, 4, 3)])
def test_samples_in_a_row_are_those_of_one_rank_in_order(count, ranks, size):
    alone = [samples for samples, _ in batches(count, 1, 0, ranks * size, shuffle=True)]
    each = [rows(count, ranks, rank, size, shuffle=True) for rank in range(ranks)]
    steps = list(zip(*each, strict=True))
    assert [[s for samples, weight in step if weight for s in samples] for step in steps] == alone
    for step, samples in zip(steps, alone, strict=True):
        share = [weight / ranks / len(mine) for mine, weight in step if weight for _ in mine]
        assert share == pytest.approx([1 / len(samples)] * len(samples))


def test_rows_without_the_last_batch_of_all_ranks():
    sampler = dist.get_sampler(data(11), num_replicas=2, rank=0, exact=True, batch_size=4)
    dropping = DataLoader(data(11), 4, sampler=sampler, drop_last=True)
    assert [batch[0].tolist() for batch, _ in dist.exact_batches(dropping)] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count, ranks, _", COUNTS)
def test_each_sample_is_read_once(count, ranks, _, shuffle):
    samplers = [dist.get_sampler(data(count), num_replicas=ranks, rank=r, shuffle=shuffle, exact=True)
                for r in range(ranks)]  # fmt: skip
    assert sorted(index for sampler in samplers for index in sampler) == list(range(count))
    assert all(len(sampler) == len(list(sampler)) for sampler in samplers)


@pytest.mark.parametrize("count, ranks, size", COUNTS)
def test_batches_of_all_ranks_together_are_those_of_one_rank(count, ranks, size):
    alone = [samples for samples, _ in batches(count, 1, 0, ranks * size, shuffle=True)]
    each = [batches(count, ranks, rank, size, shuffle=True) for rank in range(ranks)]
    together = [sorted(s for samples, weight in step if weight for s in samples) for step in zip(*each, strict=True)]
    assert together == [sorted(samples) for samples in alone]


@pytest.mark.parametrize("count, ranks, size", COUNTS)
def test_weights_make_the_average_over_ranks_that_over_samples(count, ranks, size):
    each = [batches(count, ranks, rank, size) for rank in range(ranks)]
    for step in zip(*each, strict=True):
        samples = {s for mine, weight in step if weight for s in mine}
        share = [weight / ranks / len(mine) for mine, weight in step if weight for _ in mine]
        assert share == pytest.approx([1 / len(samples)] * len(samples))


def test_a_rank_without_a_sample_left_gets_its_last_batch_with_weight_0():
    assert batches(9, 4, 0, 1)[-1] == ([8], 4.0)
    assert batches(9, 4, 3, 1)[-2:] == [([7], 1.0), ([7], 0.0)]


@pytest.mark.parametrize("sampler_drops, loader_drops", [(True, False), (False, True)])
def test_dropping_the_last_leaves_full_weights_on_equally_many_batches(sampler_drops, loader_drops):
    found = []
    for rank in range(2):
        sampler = dist.get_sampler(data(9), num_replicas=2, rank=rank, exact=True, drop_last=sampler_drops)
        found.append(list(dist.exact_batches(DataLoader(data(9), 4, sampler=sampler, drop_last=loader_drops))))
    assert [[weight for _, weight in mine] for mine in found] == [[1.0], [1.0]]
    assert [batch[0].tolist() for mine in found for batch, _ in mine] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_orders_differ_by_epoch_and_seed_only():
    def order(ranks, epoch, seed):
        samplers = [dist.get_sampler(data(8), num_replicas=ranks, rank=r, shuffle=True, seed=seed, exact=True)
                    for r in range(ranks)]  # fmt: skip
        for sampler in samplers:
            sampler.set_epoch(epoch)
        return [index for step in zip(*samplers, strict=True) for index in step]

    assert order(1, 0, 0) == order(2, 0, 0) == order(4, 0, 0)
    assert order(1, 0, 0) != order(1, 1, 0) and order(1, 0, 0) != order(1, 0, 5)


def test_torchs_sampler_is_the_default_with_the_arguments_given():
    sampler = dist.get_sampler(data(5), num_replicas=2, rank=1, shuffle=True, seed=3, drop_last=True)
    assert type(sampler) is DistributedSampler
    assert (sampler.rank, sampler.num_replicas, sampler.seed, sampler.shuffle, len(sampler)) == (1, 2, 3, True, 2)
    assert isinstance(dist.get_sampler(data(5), exact=True), DistributedSampler)


def test_alone_a_rank_reads_everything(start):
    for exact in (False, True):
        assert list(dist.get_sampler(data(5), exact=exact)) == [0, 1, 2, 3, 4]


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(4)


def test_data_that_cannot_be_split_is_refused():
    with pytest.raises(lamina.ConfigError, match="2 samples cannot be split over 3 ranks"):
        batches(2, 3, 0, 1)
    with pytest.raises(lamina.ConfigError, match="4 samples cannot be split over 3 ranks"):
        rows(4, 3, 2, 2)
    with pytest.raises(lamina.ConfigError, match="exact=True"):
        dist.get_sampler(data(5), batch_size=2)
    with pytest.raises(lamina.ConfigError, match="without drop_last"):
        dist.get_sampler(data(5), exact=True, batch_size=2, drop_last=True)
    with pytest.raises(lamina.ConfigError, match="batch_size is 3, the sampler's 2"):
        batches(9, 2, 0, 3, batch_size=2)
    with pytest.raises(lamina.ConfigError, match="Stream has no length"):
        dist.get_sampler(Stream())


def test_exact_batches_needs_the_exact_sampler_and_a_batch_size():
    sampler = dist.get_sampler(data(4))
    with pytest.raises(lamina.ConfigError, match="no ExactSampler"):
        dist.exact_batches(DataLoader(data(4), batch_size=2, sampler=sampler))
    with pytest.raises(lamina.ConfigError, match="no batch_size"):
        dist.exact_batches(DataLoader(data(4), batch_size=None, sampler=dist.get_sampler(data(4), exact=True)))


def test_a_loader_whose_ranks_would_all_read_the_same_is_an_error(monkeypatch):
    dist.require_distributed_sampler(DataLoader(data(4)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"The world_size\(2\) > 1 but dataloader does not use DistributedSampler"):
        dist.require_distributed_sampler(DataLoader(data(4)))
    for exact in (False, True):
        sampler = dist.get_sampler(data(4), exact=exact)
        dist.require_distributed_sampler(DataLoader(data(4), sampler=sampler))
        dist.require_distributed_sampler(DataLoader(data(4), batch_sampler=BatchSampler(sampler, 2, False)))
        dist.require_distributed_sampler(DataLoader(data(4), batch_sampler=sampler))
    dist.require_distributed_sampler(DataLoader(Stream()))
    dist.require_distributed_sampler([1, 2])
