# SPDX-License-Identifier: Apache-2.0
"""Trainings of a script's own loop that outlive ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lamina.elastic.survivors import Survivors, why_not
from lamina.errors import PeerError, UsageError
from lamina.job import current
from lamina.pipeline.distributed_model import DistributedModel

Result = TypeVar("Result")


class Run:
    """A training of copies of a model, which goes on where ranks are lost, as long as most of the last ones are left:

        run = lamina.Run(model, optimizer, schedule=schedule)

        @run.elastic                       # called again after each loss
        def train(updates):
            for number in range(updates, STEPS): ...

    After a loss the copies that are left have the model, the states of the optimizer and the schedule as they were
    after update number `updates` of the one that has come furthest. An update that one of them has made counts, and any
    other one is made again. Buffers are as they were then, and random numbers with `seed`. A batch has as many
    microbatches as before, which the copies that are left share out.

    Args:
        model: each rank has a whole copy of it.
        optimizer: the only one of the model, a DistributedOptimizer. Its step ends a batch.
        schedule: of its rates; its step follows the optimizer's at once.

    Errors:
        UsageError: a model in parts, or with parts of states: what a lost rank had nobody else has.
    """

    def __init__(self, model: DistributedModel, optimizer: torch.optim.Optimizer, *, schedule: Any = None):
        job = current.outside_step("lamina.Run()")
        if job.model is not model or [state.optimizer for state in job.optimizers] != [optimizer]:
            raise _refused("it takes the job's DistributedModel, and its only optimizer, a DistributedOptimizer")
        if why := why_not(job):
            raise _refused(why)
        (state,) = job.optimizers
        self._training = _OwnLoop(schedule)
        self._survivors = Survivors(model, state, self._training)
        state.after_step = self._note

    @property
    def updates(self) -> int:
        """Steps of the optimizer that count."""
        return self._training.progress

    def elastic(self, train: Callable[[int], Result]) -> Result:
        """Calls `train` with the number of updates so far, and again after each loss. Returns what it returns.

        Errors:
            PeerError: a rank was lost, and too few are left, or what it had is lost with it.
        """
        while True:
            try:
                return train(self.updates)
            except PeerError as error:
                lost = error
            is_again = len({progress for progress, _ in self._survivors.go_on(lost)}) == 1
            self._survivors.tell_going_on(self.updates - (not is_again), is_again)

    def _note(self) -> None:
        self._training.progress += 1
        self._survivors.keep()


class _OwnLoop:
    """The loop of a script, as `Survivors` see it: its progress are its updates."""

    def __init__(self, schedule: Any):
        self.progress, self._schedule = 0, schedule

    def word(self) -> None:
        """Nothing is to be told."""

    def microbatches(self, copies: int) -> None:
        """The copies share out as many as before."""

    def moved(self, before: current.Job) -> None:
        """Nothing moves besides."""

    def state(self) -> Any:
        """The progress, and the state of the schedule."""
        return self.progress, None if self._schedule is None else self._schedule.state_dict()

    def take(self, state: Any) -> None:
        """Takes what another copy gave."""
        self.progress, state = state
        if self._schedule is not None:
            self._schedule.load_state_dict(state)


def _refused(why: str) -> UsageError:
    return UsageError(f"lamina.Run: {why}", code="elastic-refused")
