# SPDX-License-Identifier: Apache-2.0
"""Ranks with parts that nobody else has, which outlive others: see [Note: kept states] in
lamina/membership/keepers.h."""

import contextlib
from typing import Any

import torch

from lamina import _lamina
from lamina.checkpoints.together import everywhere
from lamina.elastic.change import MovingJob, told_of
from lamina.elastic.newcomers import set_place
from lamina.elastic.survivors import Survivors, Training, why_not
from lamina.errors import Error, PeerError
from lamina.job import current, lifetime
from lamina.model import shards
from lamina.modules.tree import ModuleTree
from lamina.optim.optimizer_state import OptimizerState
from lamina.pipeline.distributed_model import DistributedModel
from lamina.tracing.proposal import Proposal, propose
from lamina.tracing.trace import Trace


class KeptSurvivors(Survivors):
    """The ranks that go on where others are lost, with what all had some updates before, in another layout.

    Args:
        model, optimizer, training: as of Survivors.
        every: so many updates lie between two versions that are kept.
        layouts: in which they may go on, as JSON of keys of `lamina.change`, the best first.
    """

    def __init__(
        self, model: DistributedModel, optimizer: OptimizerState, training: Training, every: int, layouts: list[str]
    ):
        self._states, self._every, self._layouts = _lamina.KeptJob(), every, layouts
        self._newest = 0  # the updates of the version that was kept last
        self._epoch: tuple[int, int] = (0, 0)  # the job's, and how often its ranks have changed their layout in it
        self._kept_job: current.Job | None = None  # which kept it
        self._is_on = False
        self._end: tuple[_lamina.Session, _lamina.EpochEnd, int] | None = None  # of the session, and its epoch
        self._trace: Trace | None = None  # of the model, which its first rank alone has made
        super().__init__(model, optimizer, training)

    def begin(self) -> None:
        """From now on all go on where one is lost."""
        self._is_on = True
        self.keep()

    def keep(self) -> None:
        """An update is made: the next step keeps what it has made, when all that follows on it is done."""
        self._job = current.job()

    def end(self) -> None:
        """Waits for the others, who may lose one still: all go on together then."""
        self._job.session.barrier("world")
        self._is_on = False

    def leaving_by_sigterm(self) -> contextlib.AbstractContextManager:
        """Does nothing: a rank that SIGTERM ends is lost."""
        return contextlib.nullcontext()

    def look(self) -> None:
        """A step begins, which keeps what is due."""
        is_due = self._kept_job is not self._job or self._training.progress - self._newest >= self._every
        if self._is_on and is_due and self._job.partitioned_model is not None and self._trains():
            self._keep_now()

    def keep_version(self) -> None:
        """Keeps what there is, of a model that is cut. Collective over the world."""
        self._keep_now()

    def _trains(self) -> bool:
        """False of an evaluation, which some ranks may make by themselves."""
        return torch.is_grad_enabled() and any(module.training for module in self._model.modules())

    def _keep_now(self) -> None:
        job = self._job
        job.life.make_again()
        if self._trace is None and job.session.size > 1:
            own = (_sendable(job.life.trace),) if job.session.rank == 0 else None
            ((self._trace,),) = job.session.first_given("world", own)[1:]
        if job is not self._kept_job:
            began, changes = self._epoch
            self._epoch = (_lamina.own_epoch(), changes + 1 if _lamina.own_epoch() == began else 0)
            self._kept_job = job
        began, changes = self._epoch
        self._newest = self._training.progress
        self._states.keep(job.session, MovingJob(job), began << 20 | changes, self._newest, self._training.state())

    def _why_not(self, job: current.Job) -> str:
        return why_not(job, keeps_parts=True)

    def _meet(self, lost: Error | None) -> tuple[_lamina.Session, list[tuple[int, Any]]]:
        job, states, training = current.job(), self._states, self._training
        leaves = lost is None and self.doorway.leaves
        job.saves.drop() if lost is not None else job.saves.end()
        job.life.resumption = None  # of a change that was broken off
        if self._end is None or self._end[0] is not job.session:
            self._end = job.session, _lamina.EpochEnd(job.session, None), _lamina.own_epoch()
        (_, end, epochs), told = self._end, told_of(job)  # one talk, of which others may still be in the middle
        while True:
            next_ = self._agree(end, (states.told(job.session), training.word()), 0, leaves)  # the lowest rank leads
            if leaves:
                self._leave(next_)
            size = len(next_.words)
            states.decide([kept for *_, (kept, _) in next_.words])
            config = job.session.next_layout(size, self._layouts, told, training.shares_any)
            set_place(job.session, next_, next_.words[0][2], epochs + next_.number)
            try:
                session = end.open_in(next_, config)
            except PeerError:
                continue
            self._note_gone(next_, job.session.size)
            return session, [(states.updates, word) for *_, (_, word) in next_.words]

    def _go_over(self, session: _lamina.Session, told: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        before, cut = self._job, self._job.partitioned_model
        held = self._states.hold(session)
        self._optimizer.zero_grad()
        before.gradients.let_go()
        self._optimizer.let_go(with_states=False)
        if cut is not None:
            before.session.put_aside(cut.table, cut.sharding)
        shards.forget(self._model.parameters())
        for parameter in self._model.parameters():
            parameter.grad = None
        changed = self._job = lifetime.go_over(before, session)
        self._training.moved(before)
        self._model.go_on_in(changed)
        self._optimizer.go_on_in(changed)
        resumption = held.resumption(session, MovingJob(changed), keeps_options=False)
        changed.life.resumption = resumption
        proposal = everywhere(changed, lambda: self._proposal(changed, resumption.partition))
        changed.life.make(proposal=proposal)
        resumption.go_on()
        self._end = None
        self._training.take(self._states.word)
        self.keep()
        self._keep_now()
        return told

    def _proposal(self, job: current.Job, kept: dict[str, int]) -> Proposal:
        job.life.trace = self._trace
        return propose(ModuleTree(self._model.module), job.session, lambda _: self._trace or Trace(), kept)


def _sendable(trace: Trace | None) -> Trace:
    """Takes along what a trace has found out: any rank that is the first may need it."""
    return Trace() if trace is None else Trace(trace.measures, trace.ties, trace.writes)
