# SPDX-License-Identifier: Apache-2.0
"""Data loaders in a world of several ranks."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lamina import _lamina
from lamina.dist.sampler import ExactSampler, readers
from lamina.errors import ConfigError


def require_distributed_sampler(dataloader: Any, size: int | None = None) -> None:
    """For trainers: raises where every rank would read the same data. Only torch's DataLoader is looked at, and not one
    of an IterableDataset, which splits itself.

    Args:
        dataloader: that is read.
        size: how many ranks read different data; None for as many as do now.

    Errors:
        ConfigError: several ranks read, and neither the loader's sampler nor its batch sampler is a DistributedSampler.
    """
    if not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset):
        return
    size = readers() if size is None else size
    if size > 1 and not any(isinstance(each, DistributedSampler) for each in samplers(dataloader)):
        raise ConfigError(
            f"The world_size({size}) > 1 but dataloader does not use DistributedSampler. This will cause all ranks to "
            "train on the same data: pass sampler=lamina.dist.get_sampler(dataset, ...) to the DataLoader"
        )


def exact_batches(dataloader: DataLoader) -> Iterator[tuple[Any, float]]:
    """The batches of a loader with an ExactSampler, each with the weight of its loss; equally many on all ranks.

        for batch, weight in exact_batches(loader):
            (weight * loss(batch)).backward()   # a mean over the batch; gradients are averaged over the ranks

    All weights are 1.0 except in the last batch, when ranks have different numbers of samples. A rank without any gets
    the batch before once more with the weight 0.0, so that it takes part in what is collective. No communication.

    Errors:
        ConfigError: another sampler, no batch size, or another than the sampler's; a rank that would get no sample.
    """
    sampler = next((each for each in samplers(dataloader) if isinstance(each, ExactSampler)), None)
    if sampler is None:
        raise ConfigError("exact_batches: the loader's sampler is no ExactSampler: use get_sampler(..., exact=True)")
    if (size := getattr(dataloader.batch_sampler, "batch_size", None)) is None:
        raise ConfigError("exact_batches: the loader has no batch_size: give it one")
    if sampler.batch_size not in (None, size):
        raise ConfigError(f"exact_batches: the loader's batch_size is {size}, the sampler's {sampler.batch_size}")
    if sampler.total_size <= (sampler.num_replicas - 1) * (sampler.batch_size or 1):
        count, ranks = sampler.total_size, sampler.num_replicas
        raise ConfigError(f"{count} samples cannot be split over {ranks} ranks: use fewer ranks, or a smaller batch_size")
    return _weighted(dataloader, sampler, size)


def _weighted(dataloader: DataLoader, sampler: ExactSampler, size: int) -> Iterator[tuple[Any, float]]:
    batches, batch = iter(dataloader), None
    drop_last = dataloader.batch_sampler.drop_last
    if sampler.batch_size is None:
        weights = _lamina.batch_weights(sampler.total_size, sampler.num_replicas, sampler.rank, size, drop_last)
    else:
        weights = _weights_of_rows(sampler, drop_last)
    for weight in weights:
        if weight:
            batch = next(batches)
        yield batch, weight


def _weights_of_rows(sampler: ExactSampler, drop_last: bool) -> Iterator[float]:
    """The weights where ranks get samples in a row."""
    of_all = sampler.num_replicas * sampler.batch_size
    for begin in range(0, sampler.total_size - (of_all - 1 if drop_last else 0), of_all):
        together = min(of_all, sampler.total_size - begin)
        own = min(max(together - sampler.rank * sampler.batch_size, 0), sampler.batch_size)
        yield own * sampler.num_replicas / together


def samplers(dataloader: Any) -> list[Any]:
    """The objects that say which samples a DataLoader reads; [] for another iterable."""
    if not isinstance(dataloader, DataLoader):
        return []
    batch_sampler = dataloader.batch_sampler
    return [dataloader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
