# SPDX-License-Identifier: Apache-2.0
"""Ranks with parts that nobody else has, which outlive others, and take in newcomers: see [Note: kept states] in
lamina/membership/keepers.h."""

import weakref
from collections.abc import Callable
from typing import Any

from lamina import _lamina
from lamina.checkpoints.checkpointed_job import CheckpointedJob
from lamina.checkpoints.together import everywhere
from lamina.elastic.change import MovingJob, told_of
from lamina.elastic.survivors import Survivors, Training
from lamina.job import current
from lamina.modules.tree import ModuleTree
from lamina.optim.optimizer_state import OptimizerState
from lamina.pipeline.distributed_model import DistributedModel
from lamina.tracing.proposal import Proposal, propose
from lamina.tracing.trace import Trace


class KeptSurvivors(Survivors):
    """The ranks that go on where others are lost, with what all had some updates before, in another layout. The engine
    decides: see lamina/session/part_survivors.h.

    Args:
        model, optimizer, training: as of Survivors.
        every: so many updates lie between two versions that are kept, or "auto", as few as take 2 % of the time.
        layouts: in which they may go on, as JSON of keys of `lamina.change`, the best first.
    """

    def __init__(
        self,
        model: DistributedModel,
        optimizer: OptimizerState,
        training: Training,
        every: int | str,
        layouts: list[str],
    ):
        self._trace: Trace | None = None  # of the model, which its first rank alone has made
        self._asked_in: Callable[[], _lamina.Session | None] = lambda: None  # for it
        self._every, self._layouts = None if every == "auto" else every, layouts
        super().__init__(model, optimizer, training)

    def _made(self) -> "_lamina.PartSurvivors":
        return _lamina.PartSurvivors(self, self._every, self._layouts)

    def succeed(self, before: Survivors) -> None:
        """Goes on in the place of copies, whose job takes a layout with parts."""
        self._engine.succeed(before._engine)

    def keep(self) -> None:
        """An update is made: the next step keeps what it has made, when all that follows on it is done."""
        self._engine.note_update()

    def end(self) -> None:
        """Waits for the others, who may lose one still: all go on together then."""
        self._engine.end()

    def look(self) -> bool:
        """As there; what is due is kept."""
        if current.job().partitioned_model is None:
            return False
        if self._engine.is_due:
            self._keep_now()
        return self._engine.is_called

    def keep_first(self) -> None:
        """As there, of a model that is cut. Collective over the world."""
        if current.job().partitioned_model is not None:
            self._share_trace()
            self._engine.keep_everywhere()

    def listens(self) -> bool:
        """Hears whether ranks wait to join, or want to leave; of a model that is cut. Collective over the world."""
        return current.job().partitioned_model is not None and self._engine.listen()

    def keep_version(self) -> None:
        """Keeps what there is, of a model that is cut. Collective over the world."""
        self._keep_now()

    def open_after(self, config: _lamina.Config) -> _lamina.Session:
        self._share_trace()
        return super().open_after(config)

    def _keep_now(self) -> None:
        current.job().life.make_again()
        self._share_trace()
        self._engine.keep()

    def _share_trace(self) -> None:
        """All ranks know what the first one has found out of the model; asked once in each layout, until it has."""
        session, is_known = current.session(), self._trace is not None and self._trace.measures is not None
        if is_known or session.size == 1 or self._asked_in() is session:
            return
        self._asked_in = weakref.ref(session)
        own = (self._traced(),) if session.rank == 0 else None
        ((self._trace,),) = session.first_given("world", own)[1:]

    # Methods that the engine calls.

    def lend(self) -> MovingJob:
        return MovingJob(current.job())

    def told(self) -> "_lamina.ChangingJob":
        return told_of(current.job())

    def states(self) -> Any:
        return self._training.state()

    def take(self, states: Any) -> None:
        self._training.take(states)

    def given(self) -> Any:
        return self._traced(), self._training.given(), self._trained()

    def take_given(self, given: Any) -> None:
        self._trace, of_training, trained = given
        self._take_trained(trained)
        self._training.take_given(of_training)

    def _go_over(self, session: _lamina.Session, hold: "Callable[[], _lamina.HeldJob] | None") -> None:
        self._optimizer.zero_grad()
        if hold is None:
            return self._go_over_whole(session)
        changed = self._change(session, is_held=True)
        resumption = hold().resumption(session, MovingJob(changed), keeps_options=False)
        changed.life.resumption = resumption
        proposal = everywhere(changed, lambda: self._proposal(changed, resumption.partition))
        changed.life.make(proposal=proposal)
        resumption.go_on()
        self._optimizer.count_anew()  # newcomers have loaded less

    def _go_over_whole(self, session: _lamina.Session) -> None:
        """Each rank has all of the model, and what waits to be loaded."""
        waiting = current.job().life.resumption
        changed = self._change(session, is_held=False)
        if waiting is not None:
            changed.life.resumption = waiting.for_job(session, CheckpointedJob(changed))
        if not changed.pipelined:
            changed.life.make()

    def _traced(self) -> Trace:
        """Gives what a trace has found out, if anything: any rank that is the first may need it."""
        is_known = self._trace is not None and self._trace.measures is not None
        trace = self._trace if is_known else current.job().life.trace
        return Trace() if trace is None else Trace(trace.measures, trace.ties, trace.writes)

    def _proposal(self, job: current.Job, kept: dict[str, int]) -> Proposal:
        job.life.trace = self._trace
        return propose(ModuleTree(self._model.module), job.session, lambda _: self._trace or Trace(), kept)
