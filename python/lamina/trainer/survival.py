# SPDX-License-Identifier: Apache-2.0
"""A training that goes on where ranks are lost."""

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lamina import _lamina
from lamina.elastic import newcomers
from lamina.elastic.kept import KeptSurvivors
from lamina.elastic.newcomers import EpochOverError
from lamina.elastic.survivors import Survivors, refuse, why_not
from lamina.errors import DesyncError, Error, PeerError
from lamina.job import current
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD, rank
from lamina.script_state import generators
from lamina.trainer.checkpoints import Saver, put_states_of, states_of
from lamina.trainer.events import Event
from lamina.trainer.job import TrainerJob
from lamina.trainer.layouts import Layouts
from lamina.trainer.loop import Loop, Place
from lamina.trainer.shares import Ends, Loaders
from lamina.trainer.training_state import TrainingState
from lamina.trainer.versions import Versions

Result = TypeVar("Result")


class Survival:
    """Lets a training go on where ranks are lost, and where others join, under `lamina run --elastic`.

    [Note: trainings that outlive ranks] Ranks that hear of a loss may be at different places of the loop, but not far
    apart: each waits for all of them several times in a batch. Its time is the number of batches and epochs that are
    over. Between the update of a batch and its new time no copy waits for another one. So all of them are at the same
    time, or some at the one before, which then take model, optimizer, schedules and time from the one that has come
    furthest. They go on from the first place of the loop that one of them is at. Where that is before a batch, it is
    read and run again. Events of that place come again, too.

    Ranks with parts that nobody else has go back together, to a version that all have kept: see Versions. Each is kept
    when the time of a batch begins, so all that follows on the batch comes again.

    A call of fit(), eval(), predict() or close() ends with a meeting, when each rank has all that it needs. So where
    one has left a call, it is over for the others, wherever they heard of the loss. Else they make it again, or go on
    with it. The calls of a script are counted for that.

    Others join before a batch, at one and the same place of all. Who leaves in order does so there, too. Ranks with
    parts keep a version there, with which all go on.

    Args:
        job, state, engine, loop, layouts: of the training.
        saver: of its checkpoints, if any.
        keep_every, others: how ranks with parts keep them, see KeptSurvivors; "auto" as Versions say.
    """

    def __init__(
        self,
        job: TrainerJob,
        state: TrainingState,
        engine: Any,
        loop: Loop,
        layouts: Layouts,
        saver: Saver | None,
        keep_every: int | str,
        others: list[str],
    ):
        self._job, self._state, self._engine = job, state, engine
        self._loop, self._layouts, self._saver = loop, layouts, saver
        self._others = others
        self._before: dict[Place, tuple[Any, Any]] = {}  # generators, states of callbacks, at places of this time
        self._updates = False  # an update was made whose batch has not ended
        self._ends = False  # the epoch of these ranks, before the next batch: others come or leave
        self._calls = 0  # of this script, that have begun
        self._survivors: Survivors | None = None
        self._versions: Versions | None = None  # where ranks have parts
        self._is_on = "LAMINA_ELASTIC" in os.environ
        self._is_in_call = False
        self._job_before: current.Job | None = None  # at the place before
        self._new_versions = lambda: Versions(state, loop, layouts, saver, keep_every)
        if self._is_on:
            current.session().require_layouts(others, of_copies=True)
            self._begin_surviving()
            loop.when_there, job.outlives = self._keep, self.call
            current.job().open_after = self._open_after

    def _begin_surviving(self) -> None:
        """Copies go on with what one of them has, ranks with parts with what they have kept."""
        if current.job() is self._job_before:
            return
        job = self._job_before = current.job()
        has_parts = bool(why_not(job)) and not why_not(job, keeps_parts=True)
        if self._survivors is not None and (self._versions is not None or not has_parts):
            return
        (optimizer,) = job.optimizers
        if has_parts:
            self._go_on_with_parts()
            optimizer.after_step = lambda: None
        else:
            self._survivors = Survivors(self._job.model, optimizer, self)
            optimizer.after_step = self._note_update

    def _open_after(self, config: Any) -> Any:
        """See `Survivors.open_after`. In a layout with parts copies become ranks that keep these."""
        before = self._survivors
        if self._versions is None and not _lamina.key_of_parts(config):
            return before.open_after(config)
        is_new = self._versions is None
        if is_new:
            self._go_on_with_parts()
        try:
            self._keep_version(1)
            session = self._survivors.open_after(config)
        except BaseException:
            if is_new:
                self._survivors, self._versions = before, None
            raise
        if is_new:
            self._survivors.succeed(before)
            current.job().optimizers[0].after_step = lambda: None
        return session

    def _go_on_with_parts(self) -> None:
        (optimizer,) = current.job().optimizers
        self._versions = self._new_versions()
        self._survivors = KeptSurvivors(self._job.model, optimizer, self, 1, self._others)

    @property
    def may_leave(self) -> bool:
        """Tells whether ranks leave a training in order, and the others go on."""
        return self._is_on and not self._why_not_fewer() and not why_not(current.job(), keeps_parts=True)

    @contextlib.contextmanager
    def leaving_by_sigterm(self) -> Iterator[None]:
        """Inside, SIGTERM has this rank leave after a batch."""
        ends = current.job().own(Ends)
        ends.by_sigterm = True
        try:
            with newcomers.leaving_by_sigterm(lambda: self._survivors.doorway):
                yield
        finally:
            ends.by_sigterm = False

    def fit(self, begin: Callable[[], bool], go_on: Callable[[], bool]) -> bool:
        """Returns what `begin` returns, or where ranks are lost meanwhile what `go_on` does, from the loop's place on.

        Errors:
            PeerError: a rank was lost, and too few are left, or what it had is lost with it.
            SystemExit: this one has left in order, after SIGTERM.
        """
        if not self._is_on:
            return begin()
        with self._called():
            fit, stops = begin, False
            try:
                fit = go_on if self._join() else begin
            except PeerError as error:
                self._outlive(error)
                fit = go_on
            while True:
                try:
                    stops = fit()
                    if not (stops and self.may_leave):
                        self._keep_whole()
                        self._meet_at_end()
                        return stops
                    lost = self._prepare_leaving()
                except (PeerError, DesyncError) as error:
                    lost = error
                except EpochOverError:
                    lost = None
                self._ends = False
                if self._outlive(lost):
                    return stops
                fit = go_on

    def call(self, call: Callable[[], Result]) -> Result:
        """Returns what `call` returns, which all ranks make together, and again where some are lost meanwhile.

        Errors: as `fit`.
        """
        if not self._is_on or self._is_in_call:
            return call()
        result = None
        with self._called():
            while True:
                try:
                    self._keep_whole()  # for a script may have changed anything
                    if self._saver is not None and self._saver.owes:
                        self._saver.save(self._state, asynchronous=False)
                    result = call()
                    self._meet_at_end()
                    return result
                except (PeerError, DesyncError) as error:
                    if self._outlive(error):
                        return result

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        """Counts a call of the script's, inside."""
        self._calls, self._is_in_call = self._calls + 1, True
        self._begin_surviving()
        self._survivors.keep()
        try:
            yield
        finally:
            self._is_in_call = False
            self._survivors.doorway.end()

    def _meet_at_end(self) -> None:
        """Each has all that it needs of a call: where one has left this, nobody makes it again."""
        current.session().barrier("world")

    def _keep_whole(self) -> None:
        """Ranks with parts keep what there is: whoever leaves this knows that all can go back to it."""
        if self._versions is not None:
            self._keep_version(2)  # the second one begins when the first is everywhere

    def _keep_version(self, times: int) -> None:
        for _ in range(times if current.job().partitioned_model is not None else 0):  # not before the model is cut
            self._versions.keep(self._survivors.keep_version, self._calls)

    def _join(self) -> bool:
        """Tells whether this process has joined a training that goes on."""
        if why := self._why_not_fewer():
            newcomers.end_if_one(why)
            return False
        if newcomers.is_one():
            self._engine.run_event(Event.FIT_START)  # callbacks begin, each in a world of its own
        if (told := self._survivors.begin()) is None:
            return False
        self._meet(told)
        return True

    def _why_not_fewer(self) -> str | None:
        return self._layouts.why_not_fewer(self._versions is not None)

    def _note_update(self) -> None:
        self._updates = True
        self._ends = self._survivors.doorway.is_called()

    def _keep(self, place: Place) -> None:
        self._begin_surviving()
        self._survivors.keep()
        if self._versions is not None and current.job().partitioned_model is not None:
            begins = self._loop.after is Event.FIT_START
            if self._versions.is_first or (place == Place.first() and begins):
                self._keep_whole()
            elif place == Place.first() and self._versions.is_due:
                self._keep_version(1)
            elif place.is_before_batch and not self._why_not_fewer() and self._survivors.listens():
                self._keep_version(1)
                raise EpochOverError("ranks join or leave, which fit() sees to")
            return
        if place == Place.first():
            self._before, self._updates = {}, False
        self._before[place] = generators.states(), copy.deepcopy(states_of(self._state))
        if self._ends and place.is_before_batch:
            raise EpochOverError("ranks join or leave, which fit() sees to")

    def _prepare_leaving(self) -> None:
        """All keep what there is, for some to leave, and the others to go on there."""
        if self._state.unfinished is None and not self._loop.place.is_last:
            self._loop.place = Place.before_batch()
        self._keep_whole()

    def _outlive(self, lost: Error | None) -> bool:
        """Goes on with the ranks that are left, and newcomers, from the loop's place. Returns whether the script's call
        is over."""
        if lost is not None:
            self._survivors.require(lost)
        if self._updates and self._versions is None:
            refuse(lost, "an update was made, and something between it and the end of its batch asked other ranks")
        if why := self._why_not_fewer():
            refuse(lost, why)
        if (loaders := current.job().own_if_any(Loaders)) is not None:
            loaders.end_workers()
        while True:
            told = self._survivors.go_on(lost)
            if lost is not None:
                newcomers.end_if_told()
            try:
                return self._meet(told)
            except (PeerError, DesyncError) as error:
                lost = error

    def _meet(self, told: list[tuple[int, Any]]) -> bool:
        """All go on together. Returns whether the script's call is over.

        Args:
            told: the time and the word of each rank.
        """
        words = [word for _, word in told if word is not None]  # but of those who join
        call = max(word["call"] for word in words)
        is_over = rank() < len(words) and self._calls < call
        if self._versions is not None and self._versions.number:  # else the model was cut nowhere
            self._versions.read_on()
            number = self._state.timestamp.batch.value
            owes = allgather(self._saver is not None and self._saver.owes, WORLD)
            if any(owes):
                self._saver.owes = True
            self._survivors.tell_going_on(number, self._job.is_training)
        else:
            self._meet_copies(told, words, call)
        self._engine.run_event(Event.LAYOUT_CHANGE)
        return is_over

    def _meet_copies(self, told: list[tuple[int, Any]], words: list[dict[str, Any]], call: int) -> None:
        """All go on from the first place that one of them is at."""
        state, loop, (now, first) = self._state, self._loop, told[0]
        is_new, times = rank() >= len(words), [time for time, _ in told]
        there = [word for time, word in told if time == now and word is not None and word["call"] == call]
        earliest = min(there, key=lambda word: tuple(word["place"]))
        loop.place, after, state.unfinished = Place(*earliest["place"]), earliest["after"], earliest["unfinished"]
        if min(times[: len(words)]) < now:  # others have not heard yet that the batch is over
            loop.place, after = Place.first(), first["after"]
        if is_new:
            state.dataloader_len, self._calls = first["batches"], call
        if is_new or times[rank()] < now:
            self._before = {}
        if any(word["owes"] for word in words):
            self._saver.owes = True
            loop.place = min(loop.place, Place.of_checkpoint(len(state.evaluators)))
        loop.after = Event(after)
        if loop.place in self._before:
            drawn, heard = self._before[loop.place]
            generators.put_states(drawn)
            put_states_of(state, copy.deepcopy(heard))
        self._layouts.go_over([word["cut"] for word in words], self._layouts.handed_on())
        is_again = self._job.is_training and (loop.place.is_before_batch or loop.after is Event.FIT_START)
        number = state.timestamp.batch.value
        self._survivors.tell_going_on(number if is_again else max(number - 1, 0), is_again)

    @property
    def progress(self) -> int:
        """See Training in lamina/elastic/survivors.py, as all that follows: how many batches and epochs are over, or
        the number of the version."""
        if self._versions is not None:
            return self._versions.number
        return self._state.timestamp.batch.value + self._state.timestamp.epoch.value

    def word(self) -> dict[str, Any]:
        """Where it is, and how it cuts batches."""
        return {
            "call": self._calls,
            "place": tuple(self._loop.place),
            "after": self._loop.after.value,
            "unfinished": self._state.unfinished,
            "owes": self._versions is None and self._saver is not None and self._saver.was_broken_off(),
            "cut": self._layouts.cut(),
            "batches": self._state.dataloader_len,
        }

    def moved(self, is_held: bool) -> None:
        """Takes note of that: nothing that was kept waits for the first step."""
        self._job.has_loaded = self._job.has_loaded and not is_held

    def given(self) -> Any:
        """Gives what ranks that come to others with parts need: the versions, and the number of the script's call."""
        return self._versions.given(), self._calls

    def take_given(self, given: Any) -> None:
        """Takes that."""
        version, self._calls = given
        self._versions.take(version)

    def all_leave(self) -> None:
        """Saves where all were told to end."""
        if self._saver is not None and self._saver.saves:
            self._saver.save(self._state, asynchronous=False)

    def state(self) -> Any:
        """How far it is, and its schedules; the number of the version says all of that."""
        if self._versions is not None:
            return self._versions.number
        return self._state.progress(), [schedule.state_dict() for schedule in self._state.schedulers]

    def take(self, state: Any) -> None:
        """Goes on from there."""
        if self._versions is not None:
            return self._versions.go_back(state, self._calls)
        progress, schedules = state
        self._state.go_on(progress)
        for schedule, saved in zip(self._state.schedulers, schedules, strict=True):
            schedule.load_state_dict(saved)
