# SPDX-License-Identifier: Apache-2.0
"""A training that goes on where ranks are lost."""

import os
from collections.abc import Callable
from typing import Any

from lamina.elastic import newcomers
from lamina.elastic.newcomers import EpochOverError
from lamina.elastic.survivors import Survivors, refuse
from lamina.errors import PeerError
from lamina.job import current
from lamina.job.ranks import num_microbatches, rank
from lamina.script_state import generators
from lamina.trainer.checkpoints import Saver
from lamina.trainer.events import Event
from lamina.trainer.job import TrainerJob
from lamina.trainer.layouts import Layouts
from lamina.trainer.loop import Loop, Place
from lamina.trainer.ranks import copies
from lamina.trainer.shares import Loaders
from lamina.trainer.training_state import TrainingState


class Survival:
    """Lets a training go on where ranks are lost, and where others join, under `lamina run --elastic`.

    [Note: trainings that outlive ranks] Ranks that hear of a loss may be at different places of the loop, but not far
    apart: each waits for all of them several times in a batch. Its time is the number of batches and epochs that are
    over. Between the update of a batch and its new time no rank waits for another one. So all of them are at the same
    time, or some at the one before, which then take model, optimizer, schedules and time from the one that has come
    furthest. They go on from the first place of the loop that one of them is at. Where that is before a batch, it is
    read and run again. Events of that place come again, too.

    Others join before a batch, at one and the same place of all.

    Args:
        job, state, engine, loop, layouts: of the training.
        saver: of its checkpoints, if any.
    """

    def __init__(
        self,
        job: TrainerJob,
        state: TrainingState,
        engine: Any,
        loop: Loop,
        layouts: Layouts,
        saver: Saver | None,
    ):
        self._job, self._state, self._engine = job, state, engine
        self._loop, self._layouts, self._saver = loop, layouts, saver
        self._generators: dict[Place, dict[str, Any]] = {}  # of the process, at places of this time
        self._updates = False  # an update was made whose batch has not ended
        self._ends = False  # the epoch of these ranks, before the next batch: newcomers wait
        self.shares_any = True
        self._survivors: Survivors | None = None
        if "LAMINA_ELASTIC" in os.environ:
            (optimizer,) = current.job().optimizers
            self._survivors = Survivors(job.model, optimizer, self)
            optimizer.after_step, loop.when_there = self._note_update, self._keep

    def run(self, fit: Callable[[], bool], go_on: Callable[[], bool]) -> bool:
        """Returns what `fit` returns, or where ranks are lost meanwhile what `go_on` does, from the loop's place on.

        Errors:
            PeerError: a rank was lost, and too few are left, or what it had is lost with it.
        """
        if self._begin():
            fit = go_on
        while True:
            try:
                stops = fit()
            except PeerError as error:
                if self._survivors is None:
                    raise
                lost = error
            except EpochOverError:
                lost = None
            else:
                if self._survivors is not None:
                    self._survivors.doorway.end()
                return stops
            self._ends = False
            self._outlive(lost)
            fit = go_on

    def _begin(self) -> bool:
        """Tells whether this process has joined a training that goes on."""
        if self._survivors is None or self._layouts.why_not_fewer():
            return False
        if newcomers.is_one():
            self._engine.run_event(Event.FIT_START)  # callbacks begin, each in a world of its own
        if (told := self._survivors.begin()) is None:
            return False
        try:
            self._meet(told)
        except PeerError as error:
            self._outlive(error)
        return True

    def _note_update(self) -> None:
        self._updates = True
        self._ends = self._survivors.doorway.is_called()

    def _keep(self, place: Place) -> None:
        if place == Place.first():
            self._generators, self._updates = {}, False
        self._generators[place] = generators.states()
        self._survivors.keep()
        if self._ends and place.is_before_batch:
            raise EpochOverError("newcomers come in, which fit() sees to")

    def _outlive(self, lost: PeerError | None) -> None:
        """Goes on with the ranks that are left, and newcomers, from the loop's place."""
        if lost is not None:
            self._survivors.require(lost)
        if self._updates:
            refuse(lost, "an update was made, and something between it and the end of its batch asked other ranks")
        if why := self._layouts.why_not_fewer():
            refuse(lost, why)
        current.job().own(Loaders).end_workers()
        while True:
            told = self._survivors.go_on(lost)
            try:
                return self._meet(told)
            except PeerError as error:
                lost = error

    def _meet(self, told: list[tuple[int, Any]]) -> None:
        """All go on from the first place that one of them is at.

        Args:
            told: the time and the word of each rank.
        """
        state, loop, (now, first) = self._state, self._loop, told[0]
        told = [each for each in told if each[1] is not None]  # but for those who join
        words = [word for time, word in told if time == now]
        earliest = min(words, key=lambda word: tuple(word["place"]))
        loop.place, after, state.unfinished = Place(*earliest["place"]), earliest["after"], earliest["unfinished"]
        if len(words) < len(told):  # others have not heard yet that the batch is over
            loop.place, after = Place.first(), first["after"]
        if rank() >= len(told):
            state.dataloader_len = first["batches"]
        if rank() >= len(told) or told[rank()][0] < now:
            self._generators = {}
        if any(word["owes"] for _, word in told):
            self._saver.owes = True
            loop.place = min(loop.place, Place.of_checkpoint(len(state.evaluators)))
        loop.after = Event(after)
        if loop.place in self._generators:
            generators.put_states(self._generators[loop.place])
        self._layouts.go_over([word["cut"] for _, word in told])
        is_again = loop.place.is_before_batch or loop.after is Event.FIT_START
        number = state.timestamp.batch.value
        self._survivors.tell_going_on(number if is_again else number - 1, is_again)
        self._engine.run_event(Event.LAYOUT_CHANGE)

    @property
    def progress(self) -> int:
        """See Training in lamina/elastic/survivors.py, as all that follows: how many batches and epochs are over."""
        return self._state.timestamp.batch.value + self._state.timestamp.epoch.value

    def word(self) -> dict[str, Any]:
        """Where it is, and how it cuts batches."""
        return {
            "place": tuple(self._loop.place),
            "after": self._loop.after.value,
            "unfinished": self._state.unfinished,
            "owes": self._saver is not None and self._saver.was_broken_off(),
            "cut": self._layouts.cut(),
            "batches": self._state.dataloader_len,
        }

    def microbatches(self, copies_left: int) -> int:
        """Shares out those of all copies, until the next batch says it anew."""
        return max(-(-num_microbatches() * copies() // copies_left), 1)

    def moved(self, before: current.Job) -> None:
        """Takes along what belongs to the training."""
        self._job.take_over(before)

    def state(self) -> tuple[dict[str, Any], list[Any]]:
        """How far it is, and its schedules."""
        return self._state.progress(), [schedule.state_dict() for schedule in self._state.schedulers]

    def take(self, state: tuple[dict[str, Any], list[Any]]) -> None:
        """Goes on from there."""
        progress, schedules = state
        self._state.go_on(progress)
        for schedule, saved in zip(self._state.schedulers, schedules, strict=True):
            schedule.load_state_dict(saved)
