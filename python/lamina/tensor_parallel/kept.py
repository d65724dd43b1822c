# SPDX-License-Identifier: Apache-2.0
"""Attributes, buffers, lists and counters that modules of a region keep of their calls.

[Note: kept by turn] All ranks of a TP_GROUP compute with each one's batch, and what the modules of a region keep is to
be that of the rank's own, once: as with whole layers. So the turn of another rank begins with what its last turn left
here, and its end puts back what was this rank's. What code outside of turns has set since counts for all: ranks run
one script.

Running statistics are given with each batch, for with partitions a microbatch has its own until a step ends
([Note: running statistics] in lamina/runtime/running_statistics.h).

Which attributes and containers of the modules there are is looked at in each call. What else a call can reach (closures
of hooks, objects, names of a file) takes a walk: the first calls in a mode find what of it changes.
"""

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lamina.errors import UsageError
from lamina.script_state.holders import Attributes, Cache, Elements, Holder, Items
from lamina.script_state.walk import Reach

_CONTAINERS = (list, dict, set, deque)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_WALKS = 2  # calls in a mode; in the first one some things are only made

Contents = dict[Any, tuple[Any, Any]]  # by holder, or tensor: it, and what it holds


class Kept:
    """Things that the modules of one region keep, on the rank of this index among so many."""

    def __init__(self, size: int, index: int):
        self._size, self._index = size, index
        self._modules: list[nn.Module] = []  # the region first
        self._statistics: list[torch.Tensor] = []  # that norms of the region keep
        self._walk: Reach | None = None
        self._walked: dict[Any, int] = {}  # how often, by mode
        self._reached: dict[Any, Holder] = {}  # holders that calls change, beside those of the modules
        self._written: dict[int, torch.Tensor] = {}  # tensors that calls write into
        self._theirs: list[Contents] = [{} for _ in range(size)]  # by rank: what its last turn left, where it differs
        self._own: Contents = {}  # what the last turn left of this rank's

    def __getstate__(self) -> tuple[int, int]:
        return self._size, self._index

    def __setstate__(self, state: tuple[int, int]) -> None:
        self.__init__(*state)

    def begin(self, region: nn.Module) -> None:
        """A call begins."""
        mode = torch.is_grad_enabled(), *map(_mode, self._modules)
        self._walked[mode] = walked = self._walked.get(mode, 0) + 1
        self._walk = Reach([("", region)]) if walked <= _WALKS else None
        own, left = self._contents(), self._own
        for key, (held, content) in own.items():
            if key not in left or _same(content, left[key][1]):
                continue
            for theirs in self._theirs:
                if key in theirs:
                    theirs[key] = (held, _changed(theirs[key][1], left[key][1], content))
        self._own = own

    def statistics(self, region: nn.Module) -> list[torch.Tensor]:
        """Running statistics of norms in the region, which go with a rank's batch into its turn."""
        self._modules = self._modules or list(region.modules())
        norms = [module for module in self._modules if isinstance(module, _NormBase)]
        found = [module._buffers.get(name) for module in norms for name in _STATISTICS]
        self._statistics = [each for each in found if each is not None]
        return self._statistics

    @contextmanager
    def turn(self, index: int, statistics: list[torch.Tensor]) -> Iterator[None]:
        """In it the region is called with the batch of this rank, which has these running statistics."""
        if index == self._index:
            with self._turn(index):
                yield
            return
        own = [each.clone() for each in self._statistics]
        try:
            _write(self._statistics, statistics)
            with self._turn(index):
                yield
        finally:
            _write(self._statistics, own)

    @contextmanager
    def _turn(self, index: int) -> Iterator[None]:
        versions = {id(tensor): (tensor, tensor._version) for tensor in self._tensors()}
        theirs = {} if index == self._index else self._theirs[index]
        begun = self._own | {key: each for key, each in theirs.items() if key in self._own}
        for key in theirs.keys() & self._own.keys():
            _put(*theirs[key])
        try:
            yield
        finally:
            now = self._contents()
            changed = [key for key in now.keys() & begun.keys() if not _same(now[key][1], begun[key][1])]
            if index == self._index:
                for others in self._theirs:  # theirs is what it was
                    others |= {key: begun[key] for key in changed if key not in others}
                self._own = now
            else:
                theirs |= {key: now[key] for key in changed}
                for key in theirs.keys() & self._own.keys():
                    _put(*self._own[key])
            self._learn(versions, begun, now)

    def _learn(self, versions: dict[int, tuple[torch.Tensor, int]], begun: Contents, now: Contents) -> None:
        """Has later calls look at what this turn has changed. Not all that writes into a tensor counts its versions:
        BatchNorm does not."""
        if self._walk is None:
            written = [each for key, (each, at) in versions.items() if each._version != at and key not in self._written]
            if written:
                raise UsageError(
                    f"a module in a {type(self._modules[0]).__name__}, in which the ranks of a TP_GROUP compute with "
                    f"the batches of all of them, writes into its tensor {list(written[0].shape)}, and did not in its "
                    "first calls: let it do so from the first call on, or take prescaled_batch: true",
                    code="tp-outside",
                )
            return
        for key, (tensor, _) in versions.items():
            if key in begun and key in now and not _same(begun[key][1], now[key][1]):
                self._written[key] = tensor
        for _, holder, _, _ in self._walk.changed():
            if not isinstance(holder, Cache):
                self._reached[_key(holder)] = holder

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Tensors that calls may write into."""
        reached = [] if self._walk is None else self._walk.tensors
        kept = (each for module in self._modules for held in _held(module) for each in held.values())
        given = set(map(id, self._statistics))
        for each in itertools.chain(kept, reached):
            is_plain = isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter) and id(each) not in given
            if is_plain and each.is_leaf and not each.is_inference():
                yield each

    def _contents(self) -> Contents:
        holders = list(self._reached.values())
        if self._walk is not None:
            holders += [holder for _, holder in self._walk.holders() if not isinstance(holder, Cache)]
        for module in self._modules:
            holders += [Attributes(module), Items(module._buffers)]
            for value in module.__dict__.values():
                if type(value) in _CONTAINERS:
                    holders.append(Items(value) if type(value) is dict else Elements(value))
        found: Contents = {_key(holder): (holder, holder.content()) for holder in holders}
        for tensor in self._written.values() if self._walk is None else self._tensors():
            found[id(tensor)] = (tensor, tensor.detach().clone())
        return found


def _key(holder: Holder) -> Any:
    return id(holder.held), type(holder), tuple(getattr(holder, "_names", ()))


def _mode(module: nn.Module) -> tuple[bool, int, int]:
    return module.training, len(module._forward_hooks), len(module._forward_pre_hooks)


def _held(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._buffers, module.__dict__


def _put(held: Any, content: Any) -> None:
    if isinstance(held, torch.Tensor):
        if not _same(held, content):
            held.data.copy_(content)  # no write that a graph is to know of
    elif not _same(held.content(), content):
        held.put(content)


def _write(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for each, value in zip(tensors, values, strict=True):
        _put(each, value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return one.keys() == other.keys() and all(value is other[key] for key, value in one.items())


def _changed(theirs: Any, left: Any, now: Any) -> Any:
    """Gives what another rank's is, where code outside of turns has made this one's of what the last call left."""
    if isinstance(now, torch.Tensor):
        return now
    if any(isinstance(key, int) for key in itertools.chain(left, now)):  # elements: places mean nothing
        return {key: _apart(value) for key, value in now.items()}
    changed = {key: value for key, value in theirs.items() if key in now or key not in left}
    for key, value in now.items():
        if key not in left or left[key] is not value:
            changed[key] = _apart(value)
    return changed


def _apart(value: Any) -> Any:
    return copy.copy(value) if type(value) in _CONTAINERS else value
