# SPDX-License-Identifier: Apache-2.0
"""Batches of a data loader: how many samples they have, and how they are cut."""

import datetime
import enum
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch.utils.data import DataLoader

from lamina import _lamina
from lamina.errors import ConfigError, UsageError, refusal
from lamina.pipeline.split import Parts, Walk, is_tensor, parts_of, pieces_of
from lamina.trainer import checks

_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, datetime.date, datetime.timedelta, PurePath)
_PLAIN += (torch.dtype, torch.device, torch.Size)
_OTHERWISE = "DataSpec(dataloader, split_batch=..., get_num_samples_in_batch=...) says how to cut and to count them"


class DataSpec:
    """A data loader, and what is to be known of its batches.

    Args:
        dataloader: what gives batches, again for each epoch.
        num_samples: of an epoch, on all ranks together; else the length of the loader's dataset, where it has one.
        num_tokens: of an epoch, on all ranks together.
        device_transforms: changes a batch when it is on its device.
        split_batch: cuts a batch into a list of microbatches of a number of samples, the last with fewer. Without it
            tensors are cut along their first axis, in dictionaries, lists and tuples too; lists that hold an element
            for each sample are cut themselves. Other plain values are of every sample.
        get_num_samples_in_batch: counts a batch's samples; else what the tensors' first axes agree on.
        get_num_tokens_in_batch: counts its tokens; else 0. Both count microbatches, too.
        already_split: whether each rank's loader reads other samples, so that no DistributedSampler is needed.

    Attributes:
        cuts_itself: whether functions of its own say how many microbatches a batch has.
        counts_tokens: whether a function counts them.

    Errors:
        ConfigError: an argument that is not what it is said to be.
    """

    def __init__(
        self,
        dataloader: Iterable,
        num_samples: int | None = None,
        num_tokens: int | None = None,
        device_transforms: Callable[[Any], Any] | None = None,
        split_batch: Callable[[Any, int], Sequence[Any]] | None = None,
        get_num_samples_in_batch: Callable[[Any], int] | None = None,
        get_num_tokens_in_batch: Callable[[Any], int] | None = None,
        already_split: bool = False,
    ):
        if isinstance(dataloader, DataLoader) and dataloader._iterator is not None:
            raise ConfigError("the DataLoader is being iterated over already: give the Trainer one that is not")
        is_other = isinstance(dataloader, (str, bytes, Mapping, set, frozenset, type)) or is_tensor(dataloader)
        if not isinstance(dataloader, Iterable) or is_other:
            raise ConfigError(f"dataloader={dataloader!r} gives no batches: a DataLoader does, or any iterable")
        for name, count in (("num_samples", num_samples), ("num_tokens", num_tokens)):
            if count is not None:
                checks.number(f"DataSpec: {name}", count, 0, whole=True)
        self.dataloader = dataloader
        self.num_samples = _samples_of(dataloader) if num_samples is None else num_samples
        self.num_tokens = num_tokens
        self.device_transforms = _function("device_transforms", device_transforms, lambda batch: batch)
        self.counts_tokens = get_num_tokens_in_batch is not None
        self.cuts_itself = split_batch is not None or get_num_samples_in_batch is not None
        self._plain = None if split_batch is not None else PlainBatches()
        plain = self._plain or PlainBatches()
        self.split_batch = _function("split_batch", split_batch, plain.split)
        self.get_num_samples_in_batch = _counting("get_num_samples_in_batch", get_num_samples_in_batch, plain.count)
        self.get_num_tokens_in_batch = _counting("get_num_tokens_in_batch", get_num_tokens_in_batch, lambda batch: 0)
        self.already_split = checks.flag("DataSpec: already_split", already_split)

    @property
    def batch_size(self) -> int | None:
        """The samples of a full batch, where the loader says that."""
        return getattr(self.dataloader, "batch_size", None)

    def microbatches(
        self, batch: Any, size: int | None, pieces: int, sizes: Sequence[int] | None = None
    ) -> tuple[list[Any], list[int]]:
        """The batch in microbatches, and how many samples each has.

        Args:
            batch: what the loader gave.
            size: of a microbatch, in samples; None for `pieces` of them, as equal as can be.
            pieces: how many, where no size is given.
            sizes: of all of them, where the batch has as many samples. A `split_batch` makes them only where all have
                the size of the first one, but the last fewer.

        Errors:
            UsageError: `split_batch` gave others.
        """
        samples = self.get_num_samples_in_batch(batch)
        if sizes and sum(sizes) == samples:
            if sizes_of(samples, sizes[0], 1) == list(sizes):
                size = sizes[0]
            elif self._plain is not None:
                return self._plain.cut(batch, sizes), list(sizes)
        size = max(sizes_of(samples, size, pieces), default=1)
        if size >= samples:
            return [batch], [samples]
        found = self.split_batch(batch, size)
        if not isinstance(found, Sequence):
            raise UsageError(f"DataSpec: split_batch gave {found!r:.60}: it returns a list of microbatches")
        counts = list(map(self.get_num_samples_in_batch, found))
        if sum(counts) != samples:
            raise UsageError(
                f"DataSpec: split_batch gave microbatches of {counts} samples of a batch of {samples}: together they "
                "are that. Where that is not what they have, get_num_samples_in_batch counts wrong"
            )
        return list(found), counts

    def rest(self, batch: Any, count: int) -> list[Any]:
        """The batch without its first `count` samples, in one batch or several."""
        if self._plain is not None:
            return [self._plain.rest(batch, count)]
        return list(self.split_batch(batch, count)[1:])


def sizes_of(samples: int, size: int | None, pieces: int) -> list[int]:
    """Gives the sizes of the microbatches of a batch.

    Args:
        samples: of the batch.
        size, pieces: see DataSpec.microbatches.
    """
    if size is None:
        size = -(-samples // max(min(pieces, samples), 1))
    return [min(size, samples - begin) for begin in range(0, samples, size)]


def count_of(most: int, size: int | None, pieces: int) -> int:
    """How many microbatches a copy has.

    Args:
        most: samples of its largest batch.
        size, pieces: see DataSpec.microbatches.
    """
    return max(min(pieces, most) if size is None else -(-most // size), 1)


def ensure_data_spec(given: Any) -> DataSpec:
    """A DataSpec as it is, or of a loader, or of a dictionary of its arguments."""
    if isinstance(given, DataSpec):
        return given
    return DataSpec(**given) if isinstance(given, dict) else DataSpec(given)


class PlainBatches:
    """Batches of tensors, plain values and lists in dictionaries, lists and tuples. What was decided of a list in one
    of them holds for the others."""

    def __init__(self) -> None:
        self._lists = _lamina.KnownParts()

    def count(self, batch: Any) -> int:
        """The number of samples: rows of tensors, and elements of lists that have one for each.

        Errors:
            UsageError: they differ, or there are none.
        """
        sizes = set(_sizes(batch, self._sample_lists(batch)))
        if len(sizes) != 1:
            found = f"first axes of {', '.join(map(str, sorted(sizes)))}" if sizes else "no tensors"
            raise UsageError(f"how many samples a batch has is not clear: it has {found}. {_OTHERWISE}")
        return sizes.pop()

    def split(self, batch: Any, size: int) -> list[Any]:
        """The batch in microbatches of that many samples, in order, the last with fewer.

        Errors:
            UsageError: what it consists of cannot be cut.
        """
        lists = self._sample_lists(batch)
        counts = {-(-max(samples, 1) // size) for samples in _sizes(batch, lists)} or {1}
        if len(counts) > 1:
            raise UsageError(f"parts of a batch have different numbers of samples. {_OTHERWISE}")
        return [_part(batch, slice(number * size, (number + 1) * size), lists) for number in range(counts.pop())]

    def cut(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """The batch in microbatches of so many samples each, in order."""
        lists, begins = self._sample_lists(batch), itertools.accumulate(sizes, initial=0)
        return [_part(batch, slice(begin, begin + size), lists) for begin, size in zip(begins, sizes, strict=False)]

    def rest(self, batch: Any, count: int) -> Any:
        """The batch without its first `count` samples."""
        return _part(batch, slice(count, None), self._sample_lists(batch))

    def _sample_lists(self, batch: Any) -> set[int]:
        """The ids of lists in it that hold an element for each sample."""
        splitter = _lamina.BatchSplitter(1, False)
        splitter.begin_argument("batch", 0, False)
        walk = Walk(splitter, _parts)
        walk.add("batch", batch)
        found, not_clear = splitter.lists(self._lists)
        if not_clear is not None:
            raise refusal("list-not-clear", not_clear, _OTHERWISE)
        return {*(id(walk.nodes[number].value) for number in found), *_lists_of_values(batch, True)}


def _parts(value: Any) -> Parts | None:
    return None if _is_plain(value) else parts_of(value)


def _part(batch: Any, samples: slice, lists: set[int]) -> Any:
    """Some samples of a batch."""
    if _is_plain(batch) or (isinstance(batch, torch.Tensor) and not batch.dim()):
        return batch
    if isinstance(batch, torch.Tensor):
        begin, end, _ = samples.indices(_rows(batch))
        (piece,) = pieces_of(batch, 0, [(begin, max(end - begin, 0))])
        return piece  # a model that writes to it leaves what it has kept of another one
    if is_tensor(batch) or id(batch) in lists:
        return batch[samples]
    if (parts := parts_of(batch)) is not None:
        held, rebuild = parts
        return rebuild([_part(child, samples, lists) for _, child in held])
    raise UsageError(f"a batch of {type(batch).__name__} cannot be cut into microbatches. {_OTHERWISE}")


def _sizes(batch: Any, lists: set[int]) -> Iterable[int]:
    if is_tensor(batch):
        if batch.ndim:
            yield _rows(batch)
    elif id(batch) in lists:
        yield len(batch)
    elif not _is_plain(batch) and (parts := parts_of(batch)) is not None:
        for _, child in parts[0]:
            yield from _sizes(child, lists)


def _rows(tensor: Any) -> int:
    """How many samples a tensor has."""
    if isinstance(tensor, torch.Tensor) and tensor.is_nested:
        raise UsageError(f"a batch has a nested tensor, which has no pieces. {_OTHERWISE}")
    return tensor.shape[0]


def _is_plain(value: Any) -> bool:
    """Tells whether it is one value, and no container. NumPy's numbers are plain ones, too."""
    return isinstance(value, _PLAIN) or (hasattr(value, "dtype") and not is_tensor(value))


def _lists_of_values(value: Any, is_batch: bool = False) -> Iterable[int]:
    """The ids of lists of plain values, or of lists and dictionaries of these: each has an element for each sample.

    Errors:
        UsageError: a batch of nothing else than lists of one length, which may be its samples or parts of it.
    """
    if _is_plain(value) or is_tensor(value):
        return
    is_list = isinstance(value, (list, tuple)) and bool(value) and not hasattr(value, "_fields")
    if is_list and _has_no_tensor(value):
        is_nested = is_batch and all(isinstance(each, (list, tuple)) for each in value)
        if not is_nested or (_are_lists(value) and (len(value) == 1 or len(set(map(len, value))) > 1)):
            yield id(value)
            return
        if _are_lists(value):
            raise refusal("list-not-clear", "batch", _OTHERWISE)
    for _, child in (_parts(value) or ((),))[0]:  # tuples are parts of a batch, as torch's default_collate makes them
        yield from _lists_of_values(child)


def _are_lists(value: Any) -> bool:
    return type(value) is list and all(type(each) is list for each in value)


def _has_no_tensor(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return all(map(_has_no_tensor, value.values() if isinstance(value, Mapping) else value))
    return _is_plain(value)


def _samples_of(dataloader: Any) -> int | None:
    try:
        return len(dataloader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        return None


def _counting(name: str, given: Callable | None, default: Callable) -> Callable[[Any], int]:
    """The function, whose result is looked at."""
    count = _function(name, given, default)

    def checked(batch: Any) -> int:
        found = count(batch)
        try:
            number = int(found)
            is_one = number == found and number >= 0
        except (TypeError, ValueError, ArithmeticError, RuntimeError):
            is_one = False
        if not is_one:
            raise UsageError(f"DataSpec: {name} gave {found!r:.60} of a batch: it returns a whole number, 0 or more")
        return number

    return checked


def _function(name: str, given: Callable | None, default: Callable) -> Callable:
    return checks.function(f"DataSpec: {name}", given) or default
