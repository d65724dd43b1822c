# SPDX-License-Identifier: Apache-2.0
"""Trainings of a script's own loop that outlive ranks."""

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lamina.elastic.kept import KeptSurvivors
from lamina.elastic.newcomers import EpochOverError
from lamina.elastic.survivors import Survivors, why_not
from lamina.errors import DesyncError, PeerError, UsageError
from lamina.job import current
from lamina.job.arguments import require_same
from lamina.pipeline.distributed_model import DistributedModel
from lamina.util.checks import require_count

if TYPE_CHECKING:
    from lamina.job.keys import LayoutKeys

Result = TypeVar("Result")


class Run:
    """A training that goes on where ranks are lost, as long as most of the last ones are left, and where others join:

        run = lamina.Run(model, optimizer, schedule=schedule)

        @run.elastic                       # called again after each loss, and when others join
        def train(updates):
            for number in range(updates, STEPS): ...

    Copies of a model that are left have the model, the states of the optimizer and the schedule as they were after
    update number `updates` of the one that has come furthest. An update that one of them has made counts, and any other
    one is made again. Buffers are as they were then, and random numbers with `seed`. A batch has as many microbatches
    as before, which the copies that there are share out. A process that joins them runs the script up to `elastic` in a
    world of its own, and has there what the others have.

    Ranks with partitions, shards, slices or parts of states keep what they have in the memory of the host, each
    `keep_every` updates. Beside the next step each sends to another one what nobody else has. After a loss all go on
    from the newest version of which nothing is lost, in a layout that fits their number. So do they where others join
    or leave, with what they have then.

    Args:
        model: the job's.
        optimizer: the only one of the model, a DistributedOptimizer. Its step ends a batch.
        schedule: of its rates; its step follows the optimizer's at once.
        keep_every: so many updates lie between two versions, where ranks have parts that others have not. "auto": as
            few as take 2 % of the time.
        layouts: in which ranks with parts may go on, each as keys of `lamina.change`: the first that fits their number
            is taken. Without one that does, the model is in as many parts as the script has asked for, or in the
            nearest number that fits.

    Errors:
        UsageError: several machines without `lamina run --elastic`; without `ddp`; tensors that lie in one memory.
        ConfigError: a layout that no number of ranks allows.
    """

    def __init__(
        self,
        model: DistributedModel,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Any = None,
        keep_every: int | str = 1,
        layouts: "Iterable[LayoutKeys]" = (),
    ):
        job = current.outside_step("lamina.Run()")
        if job.model is not model or [state.optimizer for state in job.optimizers] != [optimizer]:
            raise _refused("it takes the job's DistributedModel, and its only optimizer, a DistributedOptimizer")
        if why := why_not(job, keeps_parts=True):
            raise _refused(why)
        require_same(job.session, "world", "lamina.Run()", "elastic-refused", keep_every=keep_every)
        if keep_every != "auto":
            require_count(keep_every=keep_every)
        layouts = list(map(_to_json, layouts))
        job.session.require_layouts(layouts, share_any=False)
        (state,) = job.optimizers
        self._training = _OwnLoop(schedule)
        if why_not(job):
            self._survivors = KeptSurvivors(model, state, self._training, keep_every, layouts)
        else:
            self._survivors = Survivors(model, state, self._training)
        self._is_on = False  # the training
        self._ends = False  # the epoch, for newcomers wait
        state.after_step = self._note

    @property
    def updates(self) -> int:
        """Steps of the optimizer that count."""
        return self._training.progress

    def elastic(self, train: Callable[[int], Result]) -> Result:
        """Calls `train` with the number of updates so far, and again after each loss, and when others have joined.
        Returns what it returns.

        Errors:
            PeerError: a rank was lost, and too few are left, or what it had is lost with it.
            SystemExit: in a process that was to join, where the job is over; after SIGTERM, with which a rank leaves
                after an update, and the others go on.
        """
        self._survivors.begin()
        with self._survivors.leaving_by_sigterm():
            return self._train(train)

    def _train(self, train: Callable[[int], Result]) -> Result:
        while True:
            self._is_on, current.job().before_step = True, self._look
            try:
                result = train(self.updates)
                self._survivors.end()
                self._is_on, current.job().before_step = False, lambda: None
                return result
            except (PeerError, DesyncError) as error:  # of a wait for one that has heard of a loss before
                lost = error
            except EpochOverError:
                lost = None
            self._ends = False
            told = self._survivors.go_on(lost)
            is_again = len({progress for progress, word in told if progress >= 0}) == 1
            self._survivors.tell_going_on(self.updates - (not is_again), is_again)

    def _note(self) -> None:
        self._training.progress += 1
        self._survivors.keep()
        self._ends = self._survivors.doorway.is_called()
        if self._is_on:
            current.job().before_step = self._look  # the script may have changed the layout

    def _look(self) -> None:
        """Ends the epoch before the next step of the training."""
        if (self._ends and current.job().model.module.training) or self._survivors.look():
            raise EpochOverError("ranks join or leave, which lamina.Run sees to: let it pass")


class _OwnLoop:
    """The loop of a script, as `Survivors` see it: its progress are its updates."""

    def __init__(self, schedule: Any):
        self.progress, self.shares_any, self._schedule = 0, False, schedule

    def word(self) -> None:
        """Nothing is to be told."""

    def microbatches(self, copies: int) -> None:
        """The copies share out as many as before."""

    def moved(self, before: current.Job) -> None:
        """Nothing moves besides."""

    def given(self) -> None:
        """Nothing is needed besides."""

    def take_given(self, given: None) -> None:
        """Takes nothing."""

    def all_leave(self) -> None:
        """Nothing is left to be done."""

    def state(self) -> Any:
        """The progress, and the state of the schedule."""
        return self.progress, None if self._schedule is None else self._schedule.state_dict()

    def take(self, state: Any) -> None:
        """Takes what another copy gave."""
        self.progress, state = state
        if self._schedule is not None:
            self._schedule.load_state_dict(state)


def _to_json(keys: Any) -> str:
    try:
        return json.dumps(keys)
    except (TypeError, ValueError) as error:
        raise _refused(f"a layout cannot be written as JSON: {error}") from None


def _refused(why: str) -> UsageError:
    return UsageError(f"lamina.Run: {why}", code="elastic-refused")
