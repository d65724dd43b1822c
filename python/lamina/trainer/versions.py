# SPDX-License-Identifier: Apache-2.0
"""Versions of a training whose ranks have parts that nobody else has: what belongs to each, and when the next is
due."""

import copy
import time
from collections.abc import Callable
from typing import Any

from lamina import _lamina
from lamina.job import current
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD
from lamina.script_state import generators
from lamina.trainer.checkpoints import Saver, put_states_of, states_of
from lamina.trainer.events import Event
from lamina.trainer.layouts import Layouts
from lamina.trainer.loop import Loop, Place
from lamina.trainer.training_state import TrainingState

_KEPT = 3  # those that ranks may go back to, see [Note: kept states] in lamina/membership/keepers.h, and a new one


class Versions:
    """Keeps what else belongs to each version of the model and its optimizer. Versions have numbers, alike on all
    ranks, for there may be several of one time.

    Args:
        state, loop, layouts: of the training.
        saver: of its checkpoints, if any.
        every: so many batches lie between two versions. "auto": as few as take 2 % of the time.

    Attributes:
        number: of the newest one.
    """

    def __init__(self, state: TrainingState, loop: Loop, layouts: Layouts, saver: Saver | None, every: int | str):
        self._state, self._loop, self._layouts, self._saver = state, loop, layouts, saver
        self._pace = _lamina.KeepPace(None if every == "auto" else every)
        self.number = 0
        self._words: dict[int, dict[str, Any]] = {}
        self._job: current.Job | None = None  # which kept the newest
        self._is_older = False  # that all have gone back to: of a call before

    @property
    def is_due(self) -> bool:
        """Tells whether one is to be kept after this batch."""
        return self.is_first or self._pace.is_due(self._state.timestamp.batch.value)

    @property
    def is_first(self) -> bool:
        """Tells whether there is none yet of this layout."""
        return self._job is not current.job()

    def keep(self, keep: Callable[[], None], call: int) -> None:
        """Begins another one. Collective over the world.

        Args:
            keep: keeps model and optimizer, as of that number.
            call: of the script's, by its number.
        """
        began = time.monotonic()
        self.number += 1
        self._words[self.number] = copy.deepcopy(self._word() | {"call": call})
        for number in sorted(self._words)[:-_KEPT]:
            del self._words[number]
        keep()
        self._job = current.job()
        self._pace.note_kept(current.session(), self._state.timestamp.batch.value, time.monotonic() - began)

    def _word(self) -> dict[str, Any]:
        state, saver, read = self._state, self._saver, self._layouts.handed_on()
        if self._layouts.reads_itself:  # who reads may be lost
            read = next((each for each in allgather(read, WORLD) if each is not None), None)
        return {
            "until": state.max_duration,
            "progress": state.progress(),
            "dealt": state.dealt_anew,
            "batches": state.dataloader_len,
            "schedulers": [schedule.state_dict() for schedule in state.schedulers],
            "heard": states_of(state),
            "generators": generators.states(),
            "place": tuple(self._loop.place),
            "after": self._loop.after.value,
            "read": read,
            "cut": self._layouts.cut(),
            "saved": None if saver is None else saver.saved,
        }

    def given(self) -> dict[int, dict[str, Any]]:
        """Gives what ranks that come get of these versions; see `take`. Callbacks and generators are their own, and so
        is where they read on, if they can say that."""
        own = {"heard", "generators"} | (set() if self._layouts.reads_itself else {"read"})
        return {
            number: {key: each for key, each in word.items() if key not in own} for number, word in self._words.items()
        }

    def take(self, given: dict[int, dict[str, Any]]) -> None:
        """Takes what `given` gave, on a rank that comes: it may go back to each of them."""
        self._words = given

    def go_back(self, number: int, call: int) -> None:
        """All is as it was in that version, but for what the next layout decides: see `read_on`. What a later call of
        the script has set stays: it has not trained yet.

        Args:
            number: of the version.
            call: of the script's, by its number.
        """
        state, word = self._state, copy.deepcopy(self._words[number])
        self._words = {each: kept for each, kept in self._words.items() if each <= number}
        self.number, self._is_older = number, word["call"] < call
        if self._is_older:
            return
        state.max_duration = word["until"]
        state.go_on(word["progress"])
        state.dealt_anew, state.dataloader_len = word["dealt"], word["batches"]
        for schedule, saved in zip(state.schedulers, word["schedulers"], strict=True):
            schedule.load_state_dict(saved)
        if self._saver is not None:
            self._saver.go_back(word["saved"])

    def read_on(self) -> None:
        """Has this layout go on where the version was that all have gone back to. Collective over the world."""
        self._job = current.job()
        self._pace.go_on_from(self._state.timestamp.batch.value)
        word = copy.deepcopy(self._words[self.number])
        if self._is_older:
            read = word["read"] if self._layouts.reads_itself else self._layouts.handed_on()
            self._layouts.go_over([self._layouts.cut()], read)
            return
        self._loop.place, self._loop.after = Place(*word["place"]), Event(word["after"])
        if "heard" in word:  # else this rank has come with that version
            generators.put_states(word["generators"])
            put_states_of(self._state, word["heard"])
        self._layouts.go_over([word["cut"]], word["read"] if "read" in word else self._layouts.handed_on())
