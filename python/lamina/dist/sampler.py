# SPDX-License-Identifier: Apache-2.0
"""Which samples a rank reads.

[Note: equivalence of space and time] A batch may be split over ranks (space) or over microbatches (time), and the
training is the same. With torch's DistributedSampler this is not so where the data does not divide by the ranks: it
repeats samples so that all ranks have equally many. ExactSampler repeats none: batch number t of all ranks together is
what one rank with batches as large as all theirs would read as its batch t. In the last one ranks have different
numbers of samples, some none, so `exact_batches` gives each batch the weight that makes the average over ranks that
over samples.
"""

from collections.abc import Iterator, Sequence, Sized

import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from lamina.dist import ranks
from lamina.errors import ConfigError
from lamina.job import current


class ExactSampler(DistributedSampler):
    """Gives each sample to one rank, once an epoch; ranks have equally many or one more.

    The order depends on seed and epoch (`set_epoch`) alone, not on the number of ranks. See [Note: equivalence
    of space and time].

    Args:
        dataset: one with a length.
        num_replicas, rank, shuffle, seed: see `get_sampler`.
        drop_last: leaves out the last samples, less than one per rank, so that all ranks have equally many.
        batch_size: of a rank's loader. A rank then gets so many samples in a row, so that its microbatches are those of
            one process that has all ranks' batches. In the last batch of all ranks the later ones may have none.

    Errors:
        ConfigError: a batch size that is none, or goes with drop_last.
    """

    def __init__(
        self,
        dataset: Dataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        batch_size: int | None = None,
    ):
        num_replicas, rank = _place(num_replicas, rank)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        count = len(dataset)
        if batch_size is not None and (type(batch_size) is not int or batch_size < 1 or drop_last):
            raise ConfigError(f"batch_size={batch_size!r} is a number of samples, and goes without drop_last")
        self.batch_size, self._begin = batch_size, 0
        self.total_size = count - count % num_replicas if drop_last else count
        self.num_samples = len(self._mine())

    def move(self, num_replicas: int, rank: int, begin: int = 0) -> None:
        """Takes another place among the ranks.

        Args:
            num_replicas, rank: see `get_sampler`.
            begin: the number, in the order of the epoch, of the first sample that is dealt out. All from there on are,
                with `drop_last`, too.
        """
        self.num_replicas, self.rank, self.total_size, self._begin = num_replicas, rank, len(self.dataset), begin
        self.num_samples = len(self._mine())

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(self._mine())
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        return iter([order[position] for position in self._mine()])

    def _mine(self) -> Sequence[int]:
        if self.batch_size is None:
            return range(self._begin + self.rank, self.total_size, self.num_replicas)
        begins = range(self._begin + self.rank * self.batch_size, self.total_size, self.num_replicas * self.batch_size)
        return [
            position for begin in begins for position in range(begin, min(begin + self.batch_size, self.total_size))
        ]


def get_sampler(
    dataset: Dataset,
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
    exact: bool = False,
    batch_size: int | None = None,
) -> DistributedSampler:
    """The sampler with which each rank reads its part of the data; call its `set_epoch` before each epoch.

    Args:
        dataset: one with a length.
        shuffle: whether the order of an epoch is random; it depends on `seed` and the epoch alone.
        seed: of that order, the same on all ranks.
        drop_last: leave samples out, rather than repeat some, so that all ranks have equally many.
        num_replicas, rank: how many read different data, and which of them this is. By default all ranks of the world;
            after `lamina.init` the copies of the model that read batches of their own.
        exact: no sample is repeated; see ExactSampler and `exact_batches`. Otherwise it is torch's DistributedSampler.
        batch_size: if exact: see ExactSampler.

    Errors:
        ConfigError: a dataset without a length; `batch_size` without exact, or with drop_last.
    """
    if not isinstance(dataset, Sized):
        raise ConfigError(
            f"get_sampler: a {type(dataset).__name__} has no length to split: an IterableDataset splits itself"
        )
    num_replicas, rank = _place(num_replicas, rank)
    if exact:
        return ExactSampler(dataset, num_replicas, rank, shuffle, seed, drop_last, batch_size)
    if batch_size is not None:
        raise ConfigError("get_sampler: batch_size says how an exact sampler deals: say exact=True, too")
    return DistributedSampler(dataset, num_replicas, rank, shuffle, seed, drop_last)


def readers() -> int:
    """How many ranks read different data."""
    return _place(None, None)[0]


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    if current.is_initialized():
        session = current.session()
        size, own = session.group_size("replicas"), session.group_rank("replicas")
    else:
        size, own = ranks.get_world_size(), ranks.get_global_rank()
    return size if num_replicas is None else num_replicas, own if rank is None else rank
