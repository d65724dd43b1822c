# SPDX-License-Identifier: Apache-2.0
"""How a DataLoader's sampler deals samples to the copies of the model, from any sample of an epoch on."""

import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from lamina.dist.batches import samplers
from lamina.dist.sampler import ExactSampler
from lamina.errors import ConfigError
from lamina.trainer.data_spec import count_of, sizes_of
from lamina.trainer.ranks import copies, own_copy

_TORCHDATA = "torchdata.stateful_dataloader.sampler"  # has samplers of its own, which deal as torch's


class Cut(NamedTuple):
    """How copies of the model, of which each has a row of samples of a batch, cut it into microbatches.

    [Note: microbatches of all copies] A microbatch draws random numbers by its number among those of all copies. So
    where a training goes on with other copies, they share out the very microbatches of those before: each gets the next
    ones. A number that a copy left out before, for it had fewer than another one, is left out still.

    Attributes:
        copies: so many.
        rows: samples of a full batch of each.
        size: samples of a microbatch; None for `pieces` of them, as equal as can be.
        pieces: how many, where no size is given.
    """

    copies: int
    rows: int
    size: int | None
    pieces: int

    def among(self, copies: int, samples: int) -> list[list[int]]:
        """The sizes of the microbatches that each of so many copies gets of a batch of so many samples, by their
        numbers; 0 where one is left out. Nobody gets more than of a full batch."""
        full = self._sizes(self.copies * self.rows)
        each = -(-len(full) // copies)
        found, most = _dealt(self._sizes(samples), each, copies), _dealt(full, each, copies)
        if all(sum(own) <= max(sum(limit), 1) for own, limit in zip(found, most, strict=True)):
            return found
        left = [samples - end + size for size, end in zip(full, itertools.accumulate(full), strict=True)]
        return _dealt([max(min(most, size), 0) for most, size in zip(left, full, strict=True)], each, copies)

    def pieces_among(self, copies: int) -> int:
        """How many each of so many copies has."""
        return -(-self.pieces * self.copies // copies)

    def _sizes(self, samples: int) -> list[int]:
        """Gives those of all, as the copies cut a batch of so many samples themselves."""
        own = [min(max(samples - copy * self.rows, 0), self.rows) for copy in range(self.copies)]
        count = count_of(max(own), self.size, self.pieces)
        cut = [sizes_of(samples, self.size, self.pieces) if samples else [] for samples in own]
        return [size for sizes in cut for size in sizes + [0] * (count - len(sizes))]


def _dealt(sizes: list[int], each: int, copies: int) -> list[list[int]]:
    """The next ones for each copy, as many for all."""
    sizes = sizes + [0] * (each * copies - len(sizes))
    return [sizes[copy * each : (copy + 1) * each] for copy in range(copies)]


@functools.lru_cache(maxsize=4)
def _row(cut: Cut, copies: int, own: int, samples: int) -> tuple[int, int]:
    """Gives where the samples of a copy begin and end among so many."""
    parts = cut.among(copies, samples)
    first = sum(map(sum, parts[:own]))
    return first, first + sum(parts[own])


class UnevenSampler(DistributedSampler):
    """Deals this copy its part of batches that do not divide among the copies. Each sample of a batch goes to one of
    them.

    Args:
        sampler: says the order of an epoch.
        of_all: samples of a full batch of all copies.
        cut: the microbatches that stay as they are, of samples in a row; None: each copy gets as many samples, or one
            more.

    Attributes:
        sampler, of_all: as they were given.
        begun: the number, in the order, of the first sample that is dealt out.
    """

    def __init__(self, sampler: DistributedSampler, of_all: int, cut: Cut | None):
        super().__init__(sampler.dataset, 1, 0, sampler.shuffle, sampler.seed)
        self.sampler, self.of_all, self.begun = sampler, of_all, 0
        self.set_epoch(sampler.epoch)
        self._cut, self._copies, self._own = cut, copies(), own_copy()

    def sizes(self, samples: int) -> list[int] | None:
        """Gives those of this copy's microbatches of a batch of so many samples, see `Cut.among`; None where they are
        cut anew."""
        return None if self._cut is None else self._cut.among(self._copies, samples)[self._own]

    @property
    def rows(self) -> int:
        """How many samples of a full batch are this copy's."""
        return len(self._part(0, self.of_all))

    def set_epoch(self, epoch: int) -> None:
        """As torch's."""
        super().set_epoch(epoch)
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        whole, count = self.sampler, len(self.dataset)
        if isinstance(whole, ExactSampler):
            whole.move(1, 0)
        else:
            whole.num_replicas, whole.rank, whole.total_size, whole.num_samples = 1, 0, count, count
        order = list(whole)
        return iter([order[at] for at in self._mine()])

    def __len__(self) -> int:
        return len(self._mine())

    def _mine(self) -> list[int]:
        count = len(self.dataset)
        begins = range(self.begun, count, self.of_all)
        return [at for begin in begins for at in self._part(begin, min(begin + self.of_all, count))]

    def _part(self, begin: int, end: int) -> range:
        if self._cut is None:
            return range(begin + self._own, end, self._copies)
        first, last = _row(self._cut, self._copies, self._own, end - begin)
        return range(begin + first, begin + last)


class Deal:
    """The order in which a DistributedSampler of torch's, of torchdata's or of ours deals an epoch's samples. Each
    batch of all copies has the next ones in that order, whatever their number and the size of their batches.

    Args:
        sampler: a DistributedSampler; it gets this copy's place.
        rows: samples in a batch of a copy; None where that is not known.
        drop_last: whether a last batch with fewer is left out.

    Attributes:
        samples: of an epoch.
        of_all: samples of a full batch of all copies; None where a batch sampler that is not known says that.
        order: the order depends on nothing else.
    """

    def __init__(self, sampler: DistributedSampler, rows: int | None, drop_last: bool):
        self._sampler, self._drop_last = sampler, drop_last
        self.samples, self.of_all = len(sampler.dataset), None if rows is None else rows * copies()
        if isinstance(sampler, UnevenSampler):
            self.of_all = sampler.of_all
        self.order = [self.samples, bool(sampler.shuffle), sampler.seed if sampler.shuffle else None]
        self.begin()

    @classmethod
    def of(cls, loader: Any) -> "Deal | None":
        """The loader's; its sampler gets this copy's place, and repeats no samples. None where it has none of those.

        Errors:
            ConfigError: the loader has other batches than its sampler.
        """
        found = [each for each in samplers(loader) if isinstance(each, DistributedSampler)]
        if uneven := [each for each in found if isinstance(each, UnevenSampler)]:
            return cls(uneven[0], loader.batch_sampler.batch_size, loader.batch_sampler.drop_last)
        sampler = found[0] if found else None
        if sampler is None or not _is_known(sampler, (DistributedSampler, ExactSampler), "StatefulDistributedSampler"):
            return None
        rows = getattr(loader.batch_sampler, "batch_size", None)
        if isinstance(sampler, ExactSampler) and sampler.batch_size not in (None, rows):
            raise ConfigError(f"the loader's batch_size is {rows}, its sampler's {sampler.batch_size}")
        if rows is None or not _is_known(loader.batch_sampler, (BatchSampler,), "BatchSampler"):
            return cls(sampler, None, False)
        return cls(sampler, rows, loader.batch_sampler.drop_last)

    def begin(self, at: int = 0) -> None:
        """Has the sampler deal the samples from number `at` of the order on."""
        of, own, sampler = copies(), own_copy(), self._sampler
        if isinstance(sampler, UnevenSampler):
            sampler.begun = at
            return
        if isinstance(sampler, ExactSampler):
            sampler.move(of, own, at)
            return
        sampler.num_replicas, sampler.rank = of, at + own
        sampler.total_size, sampler.num_samples = self.samples, len(range(at + own, self.samples, of))

    def after(self, batches: int, begun: int = 0) -> int:
        """The sample after so many batches of all copies, the first of which began at sample `begun`."""
        return min(begun + batches * (self.of_all or 0), self.samples)

    def sizes(self, samples: int) -> list[int] | None:
        """As UnevenSampler's; None where each copy cuts its batches by itself."""
        return self._sampler.sizes(samples) if isinstance(self._sampler, UnevenSampler) else None

    def batches(self, at: int = 0) -> int | None:
        """How many batches all copies together have from that sample on; None where that is not known."""
        if self.of_all is None:
            return None
        left = self.samples - at
        return left // self.of_all if self._drop_last else -(-left // self.of_all)


def share_out(loader: DataLoader, of_all: int, cut: Cut | None) -> None:
    """Has each copy read its part of batches of so many samples, from the next iterator of a loader on that a Deal
    knows. Where these do not divide among the copies, some read more than others.

    Args:
        loader: with batches of the same size on all copies, or shared out before.
        of_all: samples of a batch of all copies.
        cut: how other copies have cut these batches, whose microbatches are to stay where they are of samples in a row.
    """
    put_together(loader)
    own = next(each for each in samplers(loader) if isinstance(each, DistributedSampler))
    is_in_rows = isinstance(own, ExactSampler) and own.batch_size is not None
    cut = cut if is_in_rows else None
    if of_all % copies() == 0 and cut is None:
        return set_batch_size(loader, of_all // copies())
    loader.batch_sampler.sampler = uneven = UnevenSampler(own, of_all, cut)
    loader.batch_sampler.batch_size = max(uneven.rows, 1)


def put_together(loader: DataLoader) -> None:
    """Gives a loader the sampler that it had before `share_out`."""
    if isinstance(uneven := loader.batch_sampler.sampler, UnevenSampler):
        loader.batch_sampler.sampler = uneven.sampler


def set_batch_size(loader: DataLoader, rows: int) -> None:
    """Has a loader that a Deal knows give batches of so many samples, from its next iterator on."""
    loader.batch_sampler.batch_size = rows
    if loader.batch_size is not None:  # else its script has given it the batch sampler
        vars(loader)["batch_size"] = rows  # which torch does not let set by its name
    for each in samplers(loader):
        if isinstance(each, ExactSampler) and each.batch_size is not None:
            each.batch_size = rows


def is_torchdatas(loader: Any) -> bool:
    """Tells whether it is a loader of torch's with a state that counts what it has read, of a dataset without one."""
    return (
        isinstance(loader, DataLoader) and hasattr(loader, "state_dict") and not hasattr(loader.dataset, "state_dict")
    )


def goes_past_batches(state: Any) -> bool:
    """Tells whether a state of torchdata's loader, of a dataset without indices, has numbers of batches alone. It would
    go past them, and count them twice in its next state."""
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    has_place = isinstance(state, dict) and state.get("dataset_iter_state") is not None
    return not has_place and all(map(goes_past_batches, parts))


def _is_known(given: Any, kinds: tuple[type, ...], of_torchdata: str) -> bool:
    """Tells whether it goes through samples as one of these."""
    other = getattr(sys.modules.get(_TORCHDATA), of_torchdata, None)
    return type(given).__iter__ in [each.__iter__ for each in (*kinds, *([] if other is None else [other]))]
