# SPDX-License-Identifier: Apache-2.0
"""Reading of a loader by a script's own loop, on whatever number of copies of the model there are.

[Note: batches that stay] The copies with which a training began read batches as the script's loader says, and cut each
into as many microbatches as all the others did. All of these stay. Other copies, fewer or more, share them out in the
order of the copies that they were of, one more or less. So a batch of all copies has the same samples, and a microbatch
the same ones and the same random numbers, whoever computes it. Where there are more copies than microbatches, the
samples of a batch are shared out; where there are more than samples, each copy reads all of them, which makes the same
mean.

How far an epoch is read is counted in batches. Who goes on makes an iterator of its own, which begins after them.
"""

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from lamina.dist.batches import require_distributed_sampler, samplers
from lamina.dist.sampler import ExactSampler
from lamina.dist.workers import ending_workers
from lamina.errors import UsageError
from lamina.job import current
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD, size
from lamina.script_state import generators


class Reading:
    """Reads a loader: see [Note: batches that stay].

    Args:
        loader: as the script has made it for the copies that there are. It is the script's again after `end`.

    Errors:
        ConfigError: all copies would read the same, for there is no DistributedSampler.
        UsageError: several copies, and a loader that says itself what each of them reads.
    """

    def __init__(self, loader: Any):
        self._loader, self._copies, self._made_for = loader, _copies(), _place()
        self._own_batches = getattr(loader, "batch_sampler", None)
        self._rows = getattr(self._own_batches, "batch_size", None)
        self._knows = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        self._draws = not any(isinstance(each, DistributedSampler) for each in samplers(loader))  # for its order
        self.epoch = self.batches = 0  # that are over: epochs, and batches of the next one
        self._began: dict[str, Any] | None = None  # rank 0's generators when that began, where an order is drawn
        self._read = (0, 0)
        if self._copies == 1:
            return
        require_distributed_sampler(loader)
        if not self._knows or self._own_batches is None or not _is_plain(self._own_batches):
            raise UsageError(
                "lamina.Run: the loader says itself what each copy of the model reads, so that others cannot go on "
                "with it: give it a batch_size, and a sampler of lamina.dist.get_sampler",
                code="elastic-refused",
            )

    def count(self) -> None:
        """Counts what was read until now: an update has been made of it."""
        if self._read > (self.epoch, self.batches):
            self.epoch, self.batches = self._read

    def state_dict(self) -> dict[str, Any]:
        """How far the training is, and how it began; for any rank."""
        places = {"epoch": self.epoch, "batches": self.batches, "began": self._began}
        return places | {"copies": self._copies, "rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.epoch, self.batches, self._began = state["epoch"], state["batches"], state["began"]
        self._copies, self._rows = state["copies"], state["rows"]
        self._read = (self.epoch, self.batches)

    def until(self, epochs: int) -> Iterator[Any]:
        """The batches of this copy that are left until so many epochs of the training are over.

        Errors:
            UsageError: there are several copies now, and the loader is none whose batches they could share out.
        """
        while self.epoch < epochs:
            epoch, begun = self.epoch, self.batches
            self._read = (epoch, begun)
            for number, batch in enumerate(self._epoch(), begun + 1):
                self._read = (epoch, number)
                if isinstance(own := self._batch_sampler, _SharedOut):
                    current.session().number_microbatches(own.numbers.popleft())
                yield batch
            self.epoch, self.batches, self._began = epoch + 1, 0, None

    def end(self) -> None:
        """The loader is as the script has made it."""
        self._use(self._own_batches)

    def _epoch(self) -> Iterator[Any]:
        """The rest of an epoch."""
        for each in samplers(self._loader):
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(self.epoch)
        past = self.batches
        now = generators.states(self._loader) if past or self._draws else None
        if self._draws:
            if self._began is None:
                self._began = now if size() == 1 else allgather(now, WORLD)[0]
            generators.put_states(self._began, self._loader)
        is_as_made = self._made_for == _place() and self._copies == _copies()
        if not is_as_made or (past and self._knows and self._own_batches is not None):
            self._use(_SharedOut(self._batches_of_copies(), past))
            past = 0
        else:
            self._use(self._own_batches)
        with ending_workers(self._loader, by_parent=False):
            batches = iter(self._loader)
        if self.batches or (self._draws and not _are_alike(now, self._began)):  # else it draws as any loop does
            _draw_order(batches)
            generators.put_states(now, self._loader)
        return itertools.islice(batches, past, None)

    def _batches_of_copies(self) -> "list[BatchSampler]":
        """The batches of each copy with which the training began."""
        if self._copies == 1 and self._knows and self._own_batches is not None:
            return [self._own_batches]
        if not self._knows or self._own_batches is None:
            raise UsageError(
                f"lamina.Run: {_copies()} copies of the model cannot share out the batches of a loader that says "
                "itself what is read: give it a batch_size, and a dataset with a length",
                code="elastic-refused",
            )
        own = self._own_batches
        each = [_of_copy(own.sampler, number, self._copies, self._rows) for number in range(self._copies)]
        return [BatchSampler(sampler, self._rows, own.drop_last) for sampler in each]

    @property
    def _batch_sampler(self) -> Any:
        return getattr(self._loader, "batch_sampler", None)

    def _use(self, batches: Any) -> None:
        """Has the loader read these batches, from its next iterator on."""
        if self._batch_sampler is batches:
            return
        vars(self._loader)["batch_sampler"] = batches  # which torch does not let set by its name
        if self._loader.persistent_workers and self._loader._iterator is not None:  # they have what there was
            self._loader._iterator._shutdown_workers()
            self._loader._iterator = None


class _SharedOut(Sampler):
    """The batches of this copy, of those of other ones.

    Args:
        of_copies: the batches of each of them.
        past: so many are left out.

    Attributes:
        numbers: of the microbatches of each batch that was told, among those of all copies.
    """

    def __init__(self, of_copies: list[Any], past: int):
        self._of_copies, self._past, self.numbers = of_copies, past, deque()
        session = current.session()
        self._pieces = max(session.all_microbatches // len(of_copies), 1)  # of a batch of each

    def __len__(self) -> int:
        return max(max(map(len, self._of_copies)) - self._past, 0)

    def __iter__(self) -> Iterator[list[int]]:
        there = itertools.zip_longest(*self._of_copies, fillvalue=())
        return map(self._own, itertools.islice(there, self._past, None))

    def _own(self, of_copies: tuple[list[int], ...]) -> list[int]:
        copies, own = _place()
        pieces = [
            (copy * self._pieces + number, piece)
            for copy, batch in enumerate(of_copies)
            for number, piece in enumerate(_cut(list(batch), self._pieces))
        ]
        if len(pieces) < copies:
            rows = [row for _, piece in pieces for row in piece]
            pieces = list(enumerate(_cut(rows, copies) if len(rows) >= copies else [rows] * copies))
        begin, end = (len(pieces) * number // copies for number in (own, own + 1))
        self.numbers.append([number for number, _ in pieces[begin:end]])
        return [row for _, piece in pieces[begin:end] for row in piece]


def _draw_order(batches: Iterator[Any]) -> None:
    """Has an iterator of a loader draw the order of its batches, which it does with the first one."""
    if (indices := getattr(batches, "_sampler_iter", None)) is not None:
        batches._sampler_iter = itertools.chain(list(itertools.islice(indices, 1)), indices)


def _are_alike(states: dict[str, Any], others: dict[str, Any]) -> bool:
    """Tells whether torch's generator of the host is in the same state."""
    return torch.equal(states["torch"], others["torch"])


def _cut(rows: list[int], count: int) -> list[list[int]]:
    """So many pieces of a batch, as steps cut it; see lamina/pipeline/pieces.h."""
    count = min(count, len(rows))
    least, more = divmod(len(rows), max(count, 1))
    begins = [least * number + min(number, more) for number in range(count + 1)]
    return [rows[begin:end] for begin, end in itertools.pairwise(begins)]


def _of_copy(sampler: DistributedSampler, number: int, copies: int, rows: int) -> DistributedSampler:
    """As that copy's sampler is, of so many with batches of so many rows."""
    made, place = (
        copy.copy(sampler),
        (sampler.dataset, copies, number, sampler.shuffle, sampler.seed, sampler.drop_last),
    )
    if isinstance(sampler, ExactSampler):
        ExactSampler.__init__(made, *place, None if sampler.batch_size is None else rows)
    else:
        DistributedSampler.__init__(made, *place)
    made.set_epoch(sampler.epoch)
    return made


def _is_plain(batches: Any) -> bool:
    """Tells whether it makes batches as torch's does, of what a DistributedSampler gives."""
    return type(batches).__iter__ is BatchSampler.__iter__ and isinstance(batches.sampler, DistributedSampler)


def _copies() -> int:
    return current.session().group_size("replicas")


def _place() -> tuple[int, int]:
    """The number of copies, and of this rank's."""
    return _copies(), current.session().group_rank("replicas")
