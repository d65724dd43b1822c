# SPDX-License-Identifier: Apache-2.0
"""Copies of a model that outlive ranks: see [Note: ranks that are left] in lamina/session/next_epoch.h."""

import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lamina import _lamina
from lamina.elastic.newcomers import Doorway, take_place
from lamina.errors import Error
from lamina.job import current, lifetime
from lamina.model import shards
from lamina.optim.optimizer_state import OptimizerState
from lamina.pipeline.distributed_model import DistributedModel


class Training(Protocol):
    """A training of copies, as whoever runs its loop knows it.

    Attributes:
        progress: how far it is. It grows with each update, and states are those of the last one.
    """

    progress: int

    def word(self) -> Any:
        """Gives what this copy tells the others, in plain values."""

    def moved(self, is_held: bool) -> None:
        """The current job goes on in the place of another one. `is_held`: with what was kept."""

    def all_leave(self) -> None:
        """Nobody goes on, in order: all are connected still."""

    def given(self) -> Any:
        """Gives what ranks that come to others with parts need besides, before `take`; in plain values."""

    def take_given(self, given: Any) -> None:
        """Takes what `given` gave."""

    def state(self) -> Any:
        """Gives what it has besides model and optimizer, to copies that have not come so far."""

    def take(self, state: Any) -> None:
        """Takes what `state` gave."""


class Survivors:
    """The copies that go on where others are lost, with what the one has that has come furthest, and those who join.
    The engine decides: see lamina/session/survivors.h. It asks here for what the methods without a word of their own
    give, as CopiesFace names them there.

    Args:
        model: each rank has a whole copy of it.
        optimizer: the state of its only optimizer.
        training: what they go on with.

    Attributes:
        doorway: where newcomers come in.
    """

    def __init__(self, model: DistributedModel, optimizer: OptimizerState, training: Training):
        self._model, self._optimizer, self._training = model, optimizer, training
        self._own_states: dict[str, Any] | None = None  # of the optimizer, while it goes over
        self._engine = self._made()
        self.doorway = Doorway(self._engine)

    def _made(self) -> "_lamina.Survivors":
        return _lamina.Survivors(self)

    def keep(self) -> None:
        """Notes what a batch changes besides the parameters, where it has been changed."""
        self._engine.keep()

    def begin(self) -> list[tuple[int, Any]] | None:
        """The training begins: newcomers may come. A process that is one joins those who train.

        Returns:
            In such a process what `go_on` gives the others; else None.

        Errors:
            SystemExit: in a newcomer, where the job is over.
            ConfigError: in a newcomer that differs from the job.
        """
        return _together(self._engine.begin)

    def open_after(self, config: _lamina.Config) -> _lamina.Session:
        """`lamina.change()`: opens the session of another layout. Collective over the world.

        Errors: what ends the change; all go on in the layout that there was, then.
        """
        return self._engine.open_after(config)

    def keep_first(self) -> None:
        """The training begins: keeps what there is, where ranks have parts."""

    def look(self) -> bool:
        """A step of the training begins. Returns whether the epoch is to end before it, on all ranks."""
        return False

    def end(self) -> None:
        """The training is over: nobody needs others for that."""
        self.doorway.end()

    def go_on(self, lost: Error | None) -> list[tuple[int, Any]]:
        """Goes on with the copies that are left, whoever else is lost meanwhile, and newcomers. Collective over these.

        Args:
            lost: what has ended the epoch; None where newcomers wait.

        Returns:
            The progress of each and its word, in the order of their ranks from now on: the one that has come furthest
            is the first.

        Errors:
            PeerError: too few are left, or what a lost rank had is lost with it; `lost` itself where that is known.
        """
        if lost is not None:
            self.require(lost)
        return _together(functools.partial(self._engine.go_on, lost is not None))

    def require(self, lost: Error) -> None:
        """Raises `lost` where nobody goes on, with a line that says why."""
        if not self._engine.may_go_on():
            raise lost

    def tell_going_on(self, step: int, is_again: bool) -> None:
        """Says once, on the first rank, who was lost in that step, or joined after it, and what all do."""
        self._engine.tell_going_on(step, is_again)

    # Methods that the engine calls.

    @property
    def progress(self) -> int:
        return self._training.progress

    @property
    def session(self) -> _lamina.Session | None:
        job = current.job_if_any()
        return None if job is None else job.session

    def end_saves(self, is_lost: bool) -> None:
        saves = current.job().saves
        saves.drop() if is_lost else saves.end()

    def take_place(self, place: dict[str, str]) -> None:
        take_place(place)

    def facts(self) -> tuple[str, list[tuple[str, torch.Tensor]], "_lamina.ParameterTable | None", str, list[int]]:
        script = getattr(sys.modules["__main__"], "__file__", None)
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        cut = current.job().partitioned_model
        table = None if cut is None else cut.table
        return script or "", tensors, table, type(self._optimizer.optimizer).__name__, self._optimizer.group_sizes()

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._model.named_buffers())

    def word(self) -> Any:
        return self._training.word()

    def all_leave(self) -> None:
        self._training.all_leave()

    def _go_over(self, session: _lamina.Session, hold: None) -> None:
        self._own_states = self._own_states or self._optimizer.own()
        self._change(session, is_held=False).life.make()

    def _change(self, session: _lamina.Session, is_held: bool) -> current.Job:
        """Begins the job of that session in the place of the current one. Returns it.

        Args:
            is_held: values and states are kept elsewhere.
        """
        before = current.job()
        for parameter in self._model.parameters():
            parameter.grad = None
        before.gradients.let_go()
        self._optimizer.let_go(with_states=not is_held)
        if is_held and before.partitioned_model is not None:
            before.session.put_aside(before.partitioned_model.table, before.partitioned_model.sharding)
            shards.forget(self._model.parameters())
        changed = lifetime.go_over(before, session)
        self._training.moved(is_held)
        self._model.go_on_in(changed)
        self._optimizer.go_on_in(changed)
        return changed

    def states(self) -> Any:
        return self._own_states, self._training.state(), self._trained()

    def take(self, states: Any) -> None:
        if states is not None:
            self._own_states, state, trained = states
            self._training.take(state)
            self._take_trained(trained)
        self._optimizer.load_state_dict(self._own_states)
        self._optimizer.count_anew()
        self._own_states = None

    def _trained(self) -> list[str]:
        """Names the parameters that have gradients: a script may have frozen others since it began."""
        return [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]

    def _take_trained(self, names: list[str]) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(name in names)


def _together(call: Callable[[], Any]) -> Any:
    """Goes over to another session: in one and the same line, for ranks compare in which one each of them is."""
    return call()


def why_not(job: current.Job, keeps_parts: bool = False) -> str:
    """Says why the job cannot go on without a rank; "" where it can.

    Args:
        keeps_parts: what a rank alone has is kept with another one.
    """
    return job.session.why_no_survivors(keeps_parts)


def refuse(lost: Error, why: str) -> None:
    """Raises `lost`; the first rank that is left says why nobody goes on."""
    job = current.job_if_any()
    if job is not None:
        job.session.tell_no_survivors(why)
    raise lost
