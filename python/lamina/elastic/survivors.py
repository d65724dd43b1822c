# SPDX-License-Identifier: Apache-2.0
"""Copies of a model that outlive ranks: see [Note: ranks that are left] in lamina/session/next_epoch.h."""

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from lamina import _lamina
from lamina.elastic import newcomers
from lamina.elastic.newcomers import Doorway, set_place, take_place
from lamina.errors import DesyncError, Error, PeerError
from lamina.job import current, lifetime
from lamina.optim.optimizer_state import OptimizerState
from lamina.pipeline.distributed_model import DistributedModel
from lamina.util.told import tell

_HEARD_S, _EACH_S = 2.0, 0.01  # how long a loss may take to be heard of here; looks at each rank


class Training(Protocol):
    """A training of copies, as whoever runs its loop knows it.

    Attributes:
        progress: how far it is. It grows with each update, and states are those of the last one.
        shares_any: whether copies share out any number of microbatches.
    """

    progress: int
    shares_any: bool

    def word(self) -> Any:
        """Gives what this copy tells the others, in plain values."""

    def microbatches(self, copies: int) -> int | None:
        """How many each of so many copies has; None: they share out as many as before."""

    def moved(self, before: current.Job) -> None:
        """The current job goes on in the place of another one."""

    def all_leave(self) -> None:
        """Nobody goes on, in order: all are connected still."""

    def state(self) -> Any:
        """Gives what it has besides model and optimizer, to copies that have not come so far."""

    def take(self, state: Any) -> None:
        """Takes what `state` gave."""


class _Kept(NamedTuple):
    """A buffer as it was in that version."""

    buffer: torch.Tensor
    value: torch.Tensor
    version: int


class Survivors:
    """The copies that go on where others are lost, with what the one has that has come furthest, and those who join.

    Args:
        model: each rank has a whole copy of it.
        optimizer: the state of its only optimizer.
        training: what they go on with.

    Attributes:
        lost: the ranks that were lost since the last `tell_going_on`, by their numbers when they were.
        doorway: where newcomers come in.
    """

    def __init__(self, model: DistributedModel, optimizer: OptimizerState, training: Training):
        self._model, self._optimizer, self._training = model, optimizer, training
        self._is_whole = True  # what is here is of one update
        self._own_states: dict[str, Any] | None = None  # of the optimizer, while it goes over
        self._kept: dict[str, _Kept] = {}
        self._seeded: int | None = None
        self.lost: list[int] = []
        self._left: list[int] = []  # who have left since then, and newcomers
        self._joined = 0
        self._since = 0.0  # the first of them was heard of
        self.doorway = Doorway(model, optimizer.optimizer, training.shares_any)
        self.keep()

    def keep(self) -> None:
        """Notes what a batch changes besides the parameters, where it has been changed."""
        self._job = current.job()
        if why_not(self._job):
            return
        before, self._kept = self._kept, {}
        for name, buffer in self._model.named_buffers():
            kept = before.get(name)
            is_kept = kept is not None and kept.buffer is buffer and kept.version == buffer._version
            self._kept[name] = kept if is_kept else _Kept(buffer, buffer.clone(), buffer._version)
        self._seeded = current.session().seeded_steps

    def begin(self) -> list[tuple[int, Any]] | None:
        """The training begins: newcomers may come. A process that is one joins those who train.

        Returns:
            In such a process what `go_on` gives the others; else None.

        Errors:
            SystemExit: in a newcomer, where the job is over.
            ConfigError: in a newcomer that differs from the job.
        """
        if why_not(self._job):
            return None
        self.doorway.begin()
        told = self._join() if newcomers.is_one() else None
        self.doorway.begin_epoch()
        return told

    def leaving_by_sigterm(self) -> contextlib.AbstractContextManager:
        """Inside, SIGTERM has this copy leave in order."""
        return self.doorway.leaving_by_sigterm()

    def look(self) -> None:
        """A step begins."""

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
        while True:
            if lost is not None:
                self.require(lost)
            self._since = self._since or time.monotonic()
            session, told = self._meet(lost)
            try:
                if session is not None:
                    told = self._go_over(session, told)
                self.doorway.begin_epoch()
            except (PeerError, DesyncError) as error:
                lost = error
            else:
                return told

    def _join(self) -> list[tuple[int, Any]]:
        """Becomes a rank of the job, with what its first one has. Returns what `go_on` gives the others."""
        newcomer, own = self.doorway.newcomer(), self._job.session
        while True:
            place = newcomer.wait()
            take_place(place)
            try:
                session = _opened(functools.partial(newcomer.open, own, place))
                break
            except PeerError:
                pass  # the others go on without this process, for now
        try:
            self._is_whole = False
            return self._go_over(session, [(0, None)] * place.rank + [(-1, None)] * (place.size - place.rank))
        except PeerError as error:
            return self.go_on(error)

    def require(self, lost: Error) -> None:
        """Raises `lost` where nobody goes on, with a line that says why."""
        job = current.job_if_any()
        if job is not self._job or job.model is not self._model:
            refuse(lost, _lamina.CHANGES_LAYOUT)
        if not _has_lost(job.session):
            raise lost
        if why := self._why_not(job):
            refuse(lost, why)

    def tell_going_on(self, step: int, is_again: bool) -> None:
        """Says once, on the first rank, who was lost in that step, or joined after it, and what all do."""
        session, lost, took = current.session(), self.lost, time.monotonic() - self._since
        joined, gone = self._joined, self._left
        self.lost, self._left, self._joined, self._since = [], [], 0, 0.0
        if lost:
            session.tell_survivors(lost, step, is_again, took)
        elif (joined or gone) and session.rank == 0:
            now = f"{session.size} rank{'s' if session.size > 1 else ''}, copies {session.group_size('replicas')}"
            came = f"{joined} rank{'s have' if joined > 1 else ' has'} joined" if joined else ""
            went = f"rank {', '.join(map(str, gone))} ha{'ve' if len(gone) > 1 else 's'} left" if gone else ""
            tell(f"{' and '.join(filter(None, (went, came)))} before step {step}: {now}; {took:.1f} s")

    def _why_not(self, job: current.Job) -> str:
        return why_not(job)

    def _meet(self, lost: Error | None) -> tuple[_lamina.Session | None, list[tuple[int, Any]]]:
        """The next epoch's session, None where this one goes on, and what each tells; newcomers are behind."""
        job, training = current.job(), self._training
        end, epochs = _lamina.EpochEnd(job.session, self.doorway.door), _lamina.own_epoch()
        while True:
            leaves = lost is None and self.doorway.leaves
            next_ = self._agree(end, training.word(), training.progress if self._is_whole else -1, leaves)
            if leaves:
                self._leave(next_)
            told = [(progress, word) for progress, *_, word in next_.words]
            if lost is None and next_.number == 1 and next_.newcomers == 0 and len(told) == job.session.size:
                return None, told  # the newcomers have gone again
            job.saves.drop() if lost is not None else job.saves.end()
            size = len(told) + next_.newcomers
            try:
                if not self._is_whole and next_.rank == 0:
                    raise lost  # the states of all others were lost with those who had them
                set_place(job.session, next_, next_.words[0][2], epochs + next_.number)
                microbatches, epoch = training.microbatches(size), epochs + next_.number
                session = _opened(functools.partial(end.open, next_, microbatches, epoch))
                break
            except PeerError as error:
                if error is lost:
                    raise
        self._note_gone(next_, job.session.size)
        self._joined += next_.newcomers
        return session, told + [(-1, None)] * next_.newcomers

    def _leave(self, next_: _lamina.NextEpoch) -> None:
        """This rank is none of those who go on, if any do."""
        if not next_.words:
            self._training.all_leave()
        self.doorway.leave(bool(next_.words))

    def _note_gone(self, next_: _lamina.NextEpoch, size: int) -> None:
        known = {rank for _, rank, _, _ in next_.words} | set(next_.leaving)
        self.lost += [rank for rank in range(size) if rank not in known]
        self._left += next_.leaving

    def _agree(self, end: _lamina.EpochEnd, own: Any, progress: int, leaves: bool) -> _lamina.NextEpoch:
        """Agrees with the others who goes on. Each tells its progress, its rank, a port that is free there, and
        `own`."""
        word = (self._training.progress, current.session().rank, _lamina.free_port(current.session()), own)
        return end.next(word, progress, leaves)

    @torch.no_grad()
    def _bring_back(self) -> None:
        for name, buffer in self._model.named_buffers():
            buffer.copy_(self._kept[name].value)
        for parameter in self._model.parameters():
            parameter.grad = None

    def _go_over(self, session: _lamina.Session, told: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Goes on in that session, with the states of its first rank. Returns what all have told, who joins, too."""
        before, progress = self._job, [progress for progress, _ in told]
        self._bring_back()
        before.gradients.let_go()
        self._own_states = self._own_states or self._optimizer.own()
        self._optimizer.let_go(with_states=False)
        changed = self._job = lifetime.go_over(before, session)
        self._training.moved(before)
        self._model.go_on_in(changed)
        self._optimizer.go_on_in(changed)
        self._is_whole = progress[session.rank] == progress[0]
        changed.life.make()
        if len(set(progress)) > 1:
            own = (self._own_states, self._training.state(), self._seeded, told)
            _, given = session.first_given("world", own if session.rank == 0 else None)
            self._own_states, state, self._seeded, told = given
            self._training.take(state)
        self._optimizer.load_state_dict(self._own_states)
        self._optimizer.count_anew()
        self._own_states = None
        if self._seeded is not None:
            session.seeded_steps = self._seeded
        self._is_whole = True
        self.keep()
        return told


def _opened(call: Callable[[], _lamina.Session]) -> _lamina.Session:
    """Opens a session: in one and the same line, for ranks compare in which one each of them is."""
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


def _has_lost(session: _lamina.Session) -> bool:
    """True where a rank is lost to this one, too: others may have heard of it first."""
    by = time.monotonic() + _HEARD_S
    while time.monotonic() < by:
        if any(session.loss(rank, _EACH_S) for rank in range(session.size) if rank != session.rank):
            return True
    return False
