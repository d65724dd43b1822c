# SPDX-License-Identifier: Apache-2.0
"""Shares of the data that copies of the model read.

[Note: batches of all copies] Batch t of all copies together is what one process with a batch as large would read as its
batch t: see [Note: equivalence of space and time] in lamina/dist/sampler.py. Copies may have different numbers of
samples in it, some none. So before each batch they tell each other what they have, and everybody knows how much each
sample counts, and when all are at their end.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from lamina._lamina import BatchRecord
from lamina.dist.batches import require_distributed_sampler, samplers
from lamina.elastic import newcomers
from lamina.errors import UsageError
from lamina.job import current
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD, size
from lamina.trainer.data_spec import DataSpec
from lamina.trainer.ranks import leads, speaks, together
from lamina.trainer.reader import END, Reader


class Share(NamedTuple):
    """A copy's part of a batch, as `device_transforms` returned it. A copy of whose batch nothing counts repeats an
    earlier one with weight 0. Ranks that do not lead have none."""

    spec: DataSpec  # of the loader
    batch: Any
    samples: int
    by_tokens: bool  # whether parts of the batch of all copies are weighed by their tokens; else by their samples
    counts: int  # of those by which they are weighed
    everyone: BatchRecord  # the samples and tokens of all copies; whether a rank wants the training to end
    sizes: list[int] | None  # of its microbatches, where those of all copies stay as they were: see Cut.among

    @property
    def all_counts(self) -> int:
        """How many of those by which parts are weighed all copies have."""
        return self.everyone.tokens if self.by_tokens else self.everyone.samples


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
        is_dealt_anew: whether the epoch goes on with other batches than it began with; see `go_on`.

    Errors:
        ConfigError: all copies would read the same, for there is no DistributedSampler.
    """

    def __init__(self, spec: DataSpec, by_tokens: bool = False):
        self.spec, self._loader, self._by_tokens = spec, spec.dataloader, by_tokens
        self._samplers = [each for each in samplers(spec.dataloader) if callable(getattr(each, "set_epoch", None))]
        if not spec.already_split:
            require_distributed_sampler(spec.dataloader)
        current.job().own(Loaders).append(spec.dataloader)
        self._reader, self._speaks = Reader(spec), speaks()
        self._ends = current.job().own(Ends)

    @property
    def is_read(self) -> bool:
        """Tells whether batches were asked for."""
        return self._reader.is_read

    @property
    def is_dealt_anew(self) -> bool:
        return self._reader.is_dealt_anew

    def batches(self, most: int = -1) -> int | None:
        """How many batches of all copies this epoch has, `most` at most if it is not -1; None where that is not
        known."""
        found = self._reader.batches
        return found if found is None or most < 0 else min(found, most)

    def state_dict(self) -> dict[str, Any]:
        """How far this rank has read, and its random generators."""
        return self._reader.state_dict()

    def go_on(self, saved: list[dict[str, Any]], batches: int, samples: int) -> None:
        """Has the next epoch go on after so many batches and samples of all copies: `saved` are the states then, of the
        ranks of a job.

        Args:
            saved: states of the ranks of a job, see `state_dict`.
            batches: of all copies, that were read of the epoch.
            samples: of all copies, in these.
        """
        self._reader.go_on(saved, batches, samples)

    @property
    def of_all(self) -> int | None:
        """How many samples a full batch of all copies has, where it is known what these together have read."""
        return self._reader.of_all

    def handed_on(self) -> dict[str, Any]:
        """As `state_dict`, for `go_over`."""
        return self._reader.handed_on()

    def handed_on_after(self, batches: int) -> dict[str, Any]:
        """As `handed_on`, after so many batches of the epoch; `of_all` is known."""
        return self._reader.handed_on_after(batches)

    def go_over(self, of_ranks: list[dict[str, Any]], batches: int, samples: int) -> None:
        """The job has another layout, in which the copies go on where those of the one before were: see `go_on`.

        Args:
            of_ranks: what each rank has handed on.
            batches, samples: of all copies, that were read of the epoch.
        """
        self._reader, self._speaks = Reader(self.spec), speaks()
        self._reader.go_on(of_ranks, batches, samples, is_told=False)

    def of_epoch(self, number: int, most: int = -1) -> Iterator[Share]:
        """Goes through the loader, which is told the epoch's number; to batch number `most` at most, if it is not -1.
        All copies get as many."""
        for sampler in self._samplers:
            sampler.set_epoch(number)
        read = self._reader.of_epoch(most, self._ends.by_sigterm)
        batch = None  # the latest of which something counts
        for found in read:
            samples, tokens = self._counted(found)
            counts = tokens if self._by_tokens else samples
            own = BatchRecord()
            if self._speaks:
                own.give_samples(samples, tokens)
                own.has_data, own.lacks_data = found is not END, not counts and batch is None
            everyone = self._together(own)
            if not everyone.has_data:
                self._reader.end()
                return
            batch = found if counts else batch
            if everyone.lacks_data:
                others = allgather(found if counts else None, WORLD)
                if leads() and batch is None:
                    batch = next((other for other in others if other is not None), found)
            self._reader.count(samples)
            sizes = self._reader.sizes(everyone.samples)
            yield Share(self.spec, batch, samples, self._by_tokens, counts, everyone, sizes)

    def end(self) -> bool:
        """The training is at its end, on all ranks. Tells whether one wanted that."""
        own = BatchRecord()
        own.ended = 1
        return self._together(own).stops

    def _counted(self, batch: Any) -> tuple[int, int]:
        """The samples and tokens of a batch."""
        if batch is END:
            return 0, 0
        return self.spec.get_num_samples_in_batch(batch), self.spec.get_num_tokens_in_batch(batch)

    def _together(self, own: BatchRecord) -> BatchRecord:
        """The record of all ranks.

        Errors:
            UsageError: the training has ended for some of them alone.
        """
        own.stops = self._ends.is_asked or newcomers.is_leaving()  # copies hear of that with their gradients, too
        everyone = together(own)
        if not 0 < everyone.ended < size():
            return everyone
        ended = [number for number, has_ended in enumerate(allgather(own.ended, WORLD)) if has_ended]
        raise UsageError(
            f"the training has ended on rank {', '.join(map(str, ended))} alone: callbacks that stop it, and the "
            "Trainer's arguments, do so on all ranks with the same batch. lamina.allgather(value, lamina.WORLD) "
            "gives each what all of them know",
            code="trainer-alike",
        )


class Loaders(list):
    """The loaders that a job has read."""

    def end_workers(self) -> None:
        """Ends the processes that wait for a next epoch, for they hold what they had of the job when they began."""
        for loader in self:
            if getattr(loader, "persistent_workers", False) and loader._iterator is not None:
                loader._iterator._shutdown_workers()
                loader._iterator = None
