# SPDX-License-Identifier: Apache-2.0
"""Shares of the data that copies of the model read.

[Note: batches of all copies] Batch t of all copies together is what one process with a batch as large would read as its
batch t: see [Note: equivalence of space and time] in lamina/dist/sampler.py. Copies may have different numbers of
samples in it, some none. So before each batch they tell each other what they have, and everybody knows how much each
sample counts, and when all are at their end.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lamina.dist.batches import require_distributed_sampler, samplers
from lamina.dist.sampler import ExactSampler
from lamina.errors import ConfigError, UsageError
from lamina.job import current
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD, CommGroup, rank, size
from lamina.trainer.data_spec import DataSpec
from lamina.trainer.generators import generators, set_generators
from lamina.trainer.workers import outliving_sigterm
from lamina.util.told import tell


class Word(NamedTuple):
    """The word of a rank before a batch."""

    copy: int | None  # that it speaks for; None where it does not read
    has_data: bool  # whether its loader gave a batch
    had_data: bool  # whether one of which something counts came before
    stops: bool  # whether the training is to end
    samples: int
    tokens: int
    has_ended: bool = False  # there is no batch more for it


class Share(NamedTuple):
    """A copy's part of a batch, as `device_transforms` returned it. Where nothing of its own counts, the batch is an
    earlier one. Ranks that do not lead have none."""

    spec: DataSpec  # of the loader
    batch: Any
    samples: int
    by_tokens: bool  # whether parts of the batch of all copies are weighed by their tokens; else by their samples
    counts: int  # of those by which they are weighed
    all_counts: int  # of all copies
    all_samples: int
    all_tokens: int
    most: int  # samples that a copy has
    stops: bool  # whether a rank wants the training to end


class Ends:
    """Asks the training of a job to end before its time.

    Attributes:
        by_sigterm: whether SIGTERM does.
        is_asked: whether this rank wants that, which the others learn with the next batch.
    """

    by_sigterm = is_asked = False


class Shares:
    """The shares of a loader's batches.

    Args:
        spec: the loader. Its DistributedSampler gets this copy's place, and repeats no samples.
        by_tokens: whether parts of a batch count by their tokens; else by their samples.

    Attributes:
        spec: as it was given.

    Errors:
        ConfigError: all copies would read the same, for there is no DistributedSampler.
    """

    def __init__(self, spec: DataSpec, by_tokens: bool = False):
        self.spec, self._loader, self._by_tokens = spec, spec.dataloader, by_tokens
        self._copy = own_copy() if leads() else None
        self._place = [copies(), self._copy]
        self._samplers = [each for each in samplers(spec.dataloader) if callable(getattr(each, "set_epoch", None))]
        require_split(spec)
        current.job().own(Loaders).append(spec.dataloader)
        self._batches = _settle(spec.dataloader)  # of an epoch, where that is known
        self._ends = current.job().own(Ends)
        self._began: dict[str, Any] = {}  # the generators when the epoch began
        self._saved: dict[str, Any] | None = None
        self._read = 0
        self._is_through = False  # the loader has ended

    @property
    def is_read(self) -> bool:
        """Tells whether batches were asked for."""
        return bool(self._began)

    @functools.cached_property
    def length(self) -> int | None:
        """How many batches an epoch has; None where that is not known."""
        if self._batches is not None:
            return self._batches
        try:
            own = len(self._loader)
        except (TypeError, NotImplementedError):
            own = None
        lengths = [length for copy, length in allgather((self._copy, own), WORLD) if copy is not None]
        return None if None in lengths else max(lengths)

    def state_dict(self) -> dict[str, Any]:
        """How far this rank has read, and its random generators."""
        if self._saved is not None:
            return self._saved
        loader = getattr(self._loader, "state_dict", None)
        read = {} if loader is None or not leads() else {"loader": loader()}
        own = {"began": self._began, "now": generators(self._loader), "is_through": self._is_through}
        return {"place": self._place, **own, **read}

    def go_on(self, saved: list[dict[str, Any]], read: int) -> None:
        """Has the next epoch go on after so many batches: `saved` are the states then, of the ranks of a job."""
        own = (each for each in (*saved[rank() :], *saved) if each["place"] == self._place)
        self._saved, self._read = next(own, saved[0]), read

    def of_epoch(self, number: int, most: int = -1) -> Iterator[Share]:
        """Goes through the loader, which is told the epoch's number; to batch number `most` at most, if it is not -1.
        All copies get as many."""
        for sampler in self._samplers:
            sampler.set_epoch(number)
        bounds = [bound for bound in (self._batches, most) if bound is not None and bound >= 0]
        left = max(min(bounds) - self._read, 0) if bounds else None
        loader = self._begin()
        self._read, self._is_through = 0, False
        batch = None  # the latest of which something counts
        for number in itertools.count():
            found = _END if number == left else next(loader, _END)
            self._is_through = found is _END and number != left
            found = found if found is _END else self.spec.device_transforms(found)
            word = self._word(found, batch is not None)
            everyone = _together(word)
            words = list({each.copy: each for each in everyone if each.copy is not None}.values())
            if not any(each.has_data for each in words):
                return
            counts = self._counts(word)
            batch = found if counts else batch
            if not all(self._counts(each) or each.had_data for each in words):
                others = allgather(found if counts else None, WORLD)
                if leads() and batch is None:
                    batch = next((other for other in others if other is not None), found)
            all_counts, all_samples, all_tokens = (
                sum(map(count, words)) for count in (self._counts, lambda each: each.samples, lambda each: each.tokens)
            )
            stops = any(each.stops for each in everyone)
            most = max(each.samples for each in words)
            own = self.spec, batch, word.samples, self._by_tokens, counts
            yield Share(*own, all_counts, all_samples, all_tokens, most, stops)

    def _counts(self, word: Word) -> int:
        return word.tokens if self._by_tokens else word.samples

    def end(self) -> bool:
        """The training is at its end, on all ranks. Tells whether one wanted that."""
        return any(each.stops for each in _together(Word(self._copy, False, False, self._ends.is_asked, 0, 0, True)))

    def _begin(self) -> Iterator[Any]:
        """An iterator over the loader, after what is read already. What it draws when it is made is what it drew when
        the epoch began."""
        saved, self._saved = self._saved, None
        if saved is not None:
            set_generators(saved["began"] if self._read else saved["now"], self._loader)
        self._began = generators(self._loader)
        loader = self._loader if leads() else ()
        goes_on = leads() and "loader" in (saved or {}) and self._fits(saved)
        if goes_on:
            loader.load_state_dict(saved["loader"])
        with outliving_sigterm(loader) if self._ends.by_sigterm else contextlib.nullcontext():
            batches = iter(loader)
        if not goes_on:
            _skip(batches, self._read, loader)
        if saved is not None and self._read:
            set_generators(saved["now"], self._loader)
        return batches

    def _fits(self, saved: dict[str, Any]) -> bool:
        """Tells whether the loader goes on with its saved state. One of torchdata's counts samples of its copy, and at
        the end of an epoch it would draw numbers to find that."""
        is_torchdatas = isinstance(self._loader, DataLoader) and not hasattr(self._loader.dataset, "state_dict")
        if is_torchdatas:
            return bool(self._read) and saved["place"] == self._place
        return bool(self._read) or saved["is_through"]

    def _word(self, batch: Any, had_data: bool) -> Word:
        has_data = batch is not _END
        count, count_tokens = self.spec.get_num_samples_in_batch, self.spec.get_num_tokens_in_batch
        samples, tokens = (count(batch), count_tokens(batch)) if has_data else (0, 0)
        return Word(self._copy, has_data, had_data, self._ends.is_asked, samples, tokens)


_END = object()


def _together(own: Word) -> list[Word]:
    """Lists the words of all ranks.

    Errors:
        UsageError: the training has ended for some of them alone.
    """
    everyone = [Word(*each) for each in gathered(tuple(own), WORLD)]  # a class of its own takes twice as long
    ended = [number for number, each in enumerate(everyone) if each.has_ended]
    if ended and len(ended) < len(everyone):
        raise UsageError(
            f"the training has ended on rank {', '.join(map(str, ended))} alone: callbacks that stop it, and the "
            "Trainer's arguments, do so on all ranks with the same batch",
            code="trainer-alike",
        )
    return everyone


class Loaders(list):
    """The loaders that a job has read."""

    def end_workers(self) -> None:
        """Ends the processes that wait for a next epoch, for they hold what they had of the job when they began."""
        for loader in self:
            if getattr(loader, "persistent_workers", False) and loader._iterator is not None:
                loader._iterator._shutdown_workers()
                loader._iterator = None


def require_split(spec: DataSpec) -> None:
    """Raises where all copies would read the same."""
    if not spec.already_split:
        require_distributed_sampler(spec.dataloader)


def gathered(own: Any, group: CommGroup) -> list[Any]:
    """Lists what each rank of the group has; in a job of one rank nothing is sent."""
    return [own] if size() == 1 else allgather(own, group)


def leads() -> bool:
    """Tells whether this rank runs the bodies of its copy's steps, for which it reads the data."""
    return current.session().leads


def copies() -> int:
    """How many copies of the model read batches of their own."""
    return current.session().group_size("replicas")


def own_copy() -> int:
    """The number of this rank's."""
    return current.session().group_rank("replicas")


def of_each_copy(own: Any) -> list[Any]:
    """Lists what the first rank of each copy has, in the order of the copies."""
    found: dict[int, Any] = {}
    for number, theirs in gathered((own_copy(), own), WORLD):
        found.setdefault(number, theirs)
    return [found[number] for number in sorted(found)]


def _skip(batches: Iterator[Any], count: int, loader: Any) -> None:
    """Goes past so many batches: past their indices alone, where torch's loader reads them in this process."""
    has_indices = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if count and has_indices and not loader.num_workers and hasattr(batches, "_sampler_iter"):
        for _ in itertools.islice(batches._sampler_iter, count):
            pass
    elif count and leads():
        if rank() == 0:
            tell(f"{count} batches of the epoch are read again, to go on after them")
        for _ in itertools.islice(batches, count):
            pass


def _settle(loader: Any) -> int | None:
    """Gives a DistributedSampler of torch's or of ours its place, and returns the number of batches of all copies."""
    if not isinstance(loader, DataLoader):
        return None
    sampler = next((each for each in samplers(loader) if isinstance(each, DistributedSampler)), None)
    if sampler is None or type(sampler).__iter__ not in (DistributedSampler.__iter__, ExactSampler.__iter__):
        return None
    of, own, samples = copies(), own_copy(), len(sampler.dataset)
    rows = getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(sampler, ExactSampler):
        if sampler.batch_size not in (None, rows):
            raise ConfigError(f"the loader's batch_size is {rows}, its sampler's {sampler.batch_size}")
        sampler.move(of, own)
    else:
        sampler.num_replicas, sampler.rank = of, own
        sampler.total_size, sampler.num_samples = samples, len(range(own, samples, of))
    if rows is None or type(loader.batch_sampler).__iter__ is not BatchSampler.__iter__:
        return None
    of_all = rows * of
    return samples // of_all if loader.batch_sampler.drop_last else -(-samples // of_all)
