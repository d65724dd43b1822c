# SPDX-License-Identifier: Apache-2.0
"""Layouts of a Trainer's job, one after the other."""

from collections.abc import Callable
from typing import Any, NamedTuple

from lamina.checkpoints.together import everywhere
from lamina.dist.batches import require_distributed_sampler
from lamina.elastic.change import refused
from lamina.job import current
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD, num_microbatches, size
from lamina.trainer.deals import set_batch_size
from lamina.trainer.events import Event
from lamina.trainer.job import TrainerJob
from lamina.trainer.ranks import copies
from lamina.trainer.shares import Loaders, Shares
from lamina.trainer.training_state import TrainingState


class _Change(NamedTuple):
    """A layout, and how batches are shared out in it."""

    keys: dict[str, Any]
    reads_on: bool  # the same ranks read for the same copies
    rows: int | None  # samples in a batch of a copy; None where they read on, or there is no loader yet
    grad_accum: int | None


class Layouts:
    """The layouts of a Trainer's job, which `lamina.change()` asks for.

    [Note: layouts amid a training] In a training a change is made between two batches: when all have heard of the one
    before, it is evaluated and saved. The batch of all copies stays, and so do its microbatches. Where there are fewer
    copies, each gets more of both. The rest of the epoch is dealt out anew, from the next sample on. See [Note: where
    an epoch goes on] in reader.py. Where the same ranks read for the same copies, they just read on.

    Args:
        job: whose layout changes.
        state: of the training.
        engine: hears of a change.
        shares: gives what the training reads, None before there is anything.
        tell: says what the layout is.
    """

    def __init__(
        self,
        job: TrainerJob,
        state: TrainingState,
        engine: Any,
        shares: Callable[[], Shares | None],
        tell: Callable[[], None],
    ):
        self._job, self._state, self._engine, self._shares, self._tell = job, state, engine, shares, tell
        self._asked: dict[str, Any] | None = None
        current.job().change = self.ask

    def ask(self, keys: dict[str, Any]) -> None:
        """`lamina.change(**keys)`: changes the layout, in a training before its next batch. Errors come at once."""
        keys = (self._asked or {}) | keys
        self._change_to(keys)
        self._asked = keys
        if not self._job.is_training:
            self.change()

    def forget(self) -> None:
        """Nothing is asked for: the training has failed."""
        self._asked = None

    def change(self) -> bool:
        """Makes the change that was asked for, if any. Returns whether the rest of the epoch is dealt out anew."""
        if self._asked is None:
            return False
        asked, self._asked = self._asked, None
        there, shares, time = self._change_to(asked), self._shares(), self._state.timestamp
        if there.rows is not None:
            of_ranks, rows = allgather(shares.handed_on(), WORLD), shares.rows
        if not there.reads_on:
            current.job().own(Loaders).end_workers()
        self._job.change(there.keys)
        self._state.grad_accum = there.grad_accum
        if there.rows is not None:
            self._job.at_end(set_batch_size, shares.spec.dataloader, rows)
            set_batch_size(shares.spec.dataloader, there.rows)
            shares.go_over(of_ranks, time.batch_in_epoch.value, time.sample_in_epoch.value)
        self._tell()
        self._engine.run_event(Event.LAYOUT_CHANGE)
        return there.rows is not None

    def _change_to(self, keys: dict[str, Any]) -> _Change:
        """The change that these keys ask for.

        Errors:
            ConfigError, UsageError: what refuses it, the same on all ranks; nothing has changed.
        """
        if "microbatches" in keys:
            raise refused("microbatches: a Trainer's device_train_microbatch_size or grad_accum say how many there are")
        config, before = self._job.other_layout(keys | {"microbatches": 1}), current.session().config
        then = size() // (config.partitions * config.tensor_parallel_degree)
        reads_on = (config.partitions, config.placement_strategy) == (before.partitions, before.placement_strategy)
        rows, grad_accum = everywhere(current.job(), lambda: self._shared_out(then, reads_on))
        microbatches = max(num_microbatches() * copies() // then, 1)
        return _Change(keys | {"microbatches": microbatches}, reads_on, rows, grad_accum)

    def _shared_out(self, then: int, reads_on: bool) -> tuple[int | None, int | None]:
        """How many samples and microbatches a batch has of each of so many copies."""
        state, shares, of = self._state, self._shares(), copies()
        if reads_on:
            return None, state.grad_accum
        for each in state.evaluators:
            if not each.dataloader.already_split:
                require_distributed_sampler(each.dataloader.dataloader, then)
        rows = None
        if shares is not None:
            if shares.rows is None:
                raise refused(
                    f"the loader {state.dataloader_label!r} says itself what each copy of the model reads, so that "
                    "others cannot go on with it: with sampler=lamina.dist.get_sampler(dataset) a DataLoader's can"
                )
            rows, left = divmod(shares.rows * of, then)
            if left:
                raise refused(f"a batch of {shares.rows * of} samples does not divide among {then} copies of the model")
        return rows, None if state.grad_accum is None else -(-state.grad_accum * of // then)
