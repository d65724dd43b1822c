# SPDX-License-Identifier: Apache-2.0
"""Layouts of a Trainer's job, one after the other."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from lamina.checkpoints.together import everywhere
from lamina.dist.batches import require_distributed_sampler
from lamina.elastic.change import refused
from lamina.errors import ConfigError, UsageError
from lamina.job import current
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD, rank, size
from lamina.trainer.deals import Cut, put_together, set_batch_size, share_out
from lamina.trainer.events import Event
from lamina.trainer.job import TrainerJob
from lamina.trainer.ranks import copies, leads
from lamina.trainer.shares import Loaders, Shares
from lamina.trainer.training_state import TrainingState
from lamina.util.told import tell


class _Change(NamedTuple):
    """A layout, and how batches are shared out in it."""

    keys: dict[str, Any]
    reads_on: bool  # the same ranks read for the same copies
    of_all: int | None  # samples in a batch of all copies; None where they read on, or there is no loader yet
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
        self._shared: list[Any] = []  # loaders that are the script's again at the end of the job
        self._first: tuple[Any, Cut] | None = None  # how other copies have cut a loader's batches before these
        current.job().change = self.ask

    def ask(self, keys: dict[str, Any]) -> None:
        """`lamina.change(**keys)`: changes the layout, in a training before its next batch. Errors come at once."""
        keys = (self._asked or {}) | keys
        self._change_to(keys)
        self._asked = keys
        if not self._job.is_training:
            self._job.outlives(self.change)

    def forget(self) -> None:
        """Nothing is asked for: the training has failed."""
        self._asked = None

    def change(self) -> bool:
        """Makes the change that was asked for, if any. Returns whether the rest of the epoch is dealt out anew."""
        if self._asked is None:
            return False
        there, shares = self._change_to(self._asked), self._shares()
        if there.of_all is not None:
            of_ranks = allgather(shares.handed_on(), WORLD)
        if not there.reads_on:
            current.job().own(Loaders).end_workers()
        self._job.change(there.keys)
        self._asked, self._state.grad_accum = None, there.grad_accum
        if there.of_all is not None:
            self._first = None
            self._read_on(shares, there.of_all, of_ranks)
        self._tell()
        self._engine.run_event(Event.LAYOUT_CHANGE)
        return there.of_all is not None

    def why_not_fewer(self, has_parts: bool) -> str | None:
        """Says why the training cannot go on with fewer ranks; None where it can. A single copy, in parts, reads on."""
        shares = self._shares()
        if shares is None or shares.of_all is not None or (has_parts and copies() == 1):
            return None
        return _reads_itself(self._state)

    @property
    def reads_itself(self) -> bool:
        """Tells whether the loader says itself what is read."""
        shares = self._shares()
        return shares is not None and shares.of_all is None

    def handed_on(self) -> dict[str, Any] | None:
        """Where this rank is in the epoch, for `go_over`; None where it reads nothing."""
        shares = self._shares()
        if shares is None or shares.of_all is not None:
            return None if shares is None else shares.handed_on_after(self._state.timestamp.batch_in_epoch.value)
        return shares.state_dict() if leads() else None

    def cut(self) -> tuple[Cut, int | None, str]:
        """How batches are cut, how many samples they have, and the change that is asked for; for `go_over`."""
        shares = self._shares()
        of_all = None if shares is None else shares.of_all
        return self._cut(), of_all, json.dumps(self._asked, sort_keys=True)

    def go_over(self, cuts: list[tuple[Cut, int | None, str]], handed_on: dict[str, Any] | None) -> None:
        """The job has fewer copies, or more: they share out the same batches, from the place in the epoch on that the
        state has. The change that was asked for stays so where it can be made of these ranks. Collective.

        Args:
            cuts: what `cut` gave the ranks of now, but for those who join.
            handed_on: where this one goes on.

        Errors:
            UsageError: batches that these copies cannot share out.
        """
        (cut, of_all, asked), shares = cuts[0], self._shares()
        cut = Cut(*cut)
        self._state.grad_accum = None if self._state.grad_accum is None else cut.pieces_among(copies())
        self._first = None if shares is None or cut.copies == copies() else (shares.spec.dataloader, cut)
        if shares is not None:
            of_ranks = [each for each in allgather(handed_on, WORLD) if each is not None]
            self._read_on(shares, of_all, of_ranks)
        self._asked = json.loads(asked) if len({each[-1] for each in cuts}) == 1 else None
        if self._asked is not None:
            try:
                self._change_to(self._asked)
            except (ConfigError, UsageError) as error:
                self._asked = None
                if rank() == 0:
                    tell(f"the layout that was asked for is not taken: {error}")

    def _read_on(self, shares: Shares, of_all: int | None, of_ranks: list[dict[str, Any]]) -> None:
        loader, time = shares.spec.dataloader, self._state.timestamp
        if of_all is None:
            if copies() > 1:
                raise UsageError(_reads_itself(self._state))
            return shares.go_over(of_ranks, time.batch_in_epoch.value, time.sample_in_epoch.value)
        if not any(each is loader for each in self._shared):
            self._shared.append(loader)
            self._job.at_end(set_batch_size, loader, loader.batch_sampler.batch_size)
            self._job.at_end(put_together, loader)
        share_out(loader, of_all, None if self._first is None else self._first[1])
        shares.go_over(of_ranks, time.batch_in_epoch.value, time.sample_in_epoch.value)

    def _cut(self) -> Cut:
        """How the batches of the loader are cut: as the copies do it, or those did with whose batches they go on."""
        state, shares = self._state, self._shares()
        if shares is not None and self._first is not None and self._first[0] is shares.spec.dataloader:
            return self._first[1]
        of_all = None if shares is None else shares.of_all
        return Cut(copies(), (of_all or 0) // copies(), state.device_train_microbatch_size, state.grad_accum or 1)

    def _change_to(self, keys: dict[str, Any]) -> _Change:
        """The change that these keys ask for.

        Errors:
            ConfigError, UsageError: what refuses it, the same on all ranks; nothing has changed.
        """
        if "microbatches" in keys:
            raise refused("microbatches: a Trainer's device_train_microbatch_size or grad_accum say how many there are")
        config, before = self._job.other_layout(keys | {"microbatches": 1}), current.session().config
        then, reads_on = size() // _ranks_of_batch(config), _places(config) == _places(before)
        of_all, grad_accum = everywhere(current.job(), lambda: self._shared_out(then, reads_on))
        microbatches = max(current.session().all_microbatches // then, 1)
        return _Change(keys | {"microbatches": microbatches}, reads_on, of_all, grad_accum)

    def _shared_out(self, then: int, reads_on: bool) -> tuple[int | None, int | None]:
        """How many samples all of so many copies have in a batch, and how many microbatches each."""
        state, shares = self._state, self._shares()
        if reads_on:
            return None, state.grad_accum
        for each in state.evaluators:
            if not each.dataloader.already_split:
                require_distributed_sampler(each.dataloader.dataloader, then)
        of_all = None
        if shares is not None:
            if (of_all := shares.of_all) is None:
                raise refused(_reads_itself(state))
            if of_all % then:
                raise refused(f"a batch of {of_all} samples does not divide among {then} copies of the model")
        return of_all, None if state.grad_accum is None else self._cut().pieces_among(then)


def _places(config: Any) -> tuple[int, int, str]:
    """The ranks that read for each copy, in short."""
    return config.partitions, _ranks_of_batch(config), config.placement_strategy


def _ranks_of_batch(config: Any) -> int:
    """How many ranks read the same batch."""
    return config.partitions * (config.tensor_parallel_degree if config.prescaled_batch else 1)


def _reads_itself(state: TrainingState) -> str:
    return (
        f"the loader {state.dataloader_label!r} says itself what each copy of the model reads, so that others cannot "
        "go on with it: with sampler=lamina.dist.get_sampler(dataset) a DataLoader's can"
    )
