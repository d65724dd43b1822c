# SPDX-License-Identifier: Apache-2.0
"""How a DataLoader's sampler deals samples to the copies of the model, from any sample of an epoch on."""

import sys
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from lamina.dist.batches import samplers
from lamina.dist.sampler import ExactSampler
from lamina.errors import ConfigError
from lamina.trainer.ranks import copies, own_copy

_TORCHDATA = "torchdata.stateful_dataloader.sampler"  # has samplers of its own, which deal as torch's


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
        self.order = [self.samples, bool(sampler.shuffle), sampler.seed if sampler.shuffle else None]
        self.begin()

    @classmethod
    def of(cls, loader: Any) -> "Deal | None":
        """The loader's; its sampler gets this copy's place, and repeats no samples. None where it has none of those.

        Errors:
            ConfigError: the loader has other batches than its sampler.
        """
        sampler = next((each for each in samplers(loader) if isinstance(each, DistributedSampler)), None)
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
        if isinstance(sampler, ExactSampler):
            sampler.move(of, own, at)
            return
        sampler.num_replicas, sampler.rank = of, at + own
        sampler.total_size, sampler.num_samples = self.samples, len(range(at + own, self.samples, of))

    def after(self, batches: int, begun: int = 0) -> int:
        """The sample after so many batches of all copies, the first of which began at sample `begun`."""
        return min(begun + batches * (self.of_all or 0), self.samples)

    def batches(self, at: int = 0) -> int | None:
        """How many batches all copies together have from that sample on; None where that is not known."""
        if self.of_all is None:
            return None
        left = self.samples - at
        return left // self.of_all if self._drop_last else -(-left // self.of_all)


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
