# SPDX-License-Identifier: Apache-2.0
"""The current job. It knows none of its parts: who has installed something pushes its removal to `Job.on_end`."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from lamina import _lamina
from lamina.errors import refusal
from lamina.job.parts import (
    CallContext,
    Gradients,
    Life,
    Model,
    Optimizer,
    PartitionedModel,
    Recording,
    Replicas,
    Routing,
    StepCheck,
)

Made = TypeVar("Made")


@dataclass
class Job:
    """The job that one `init` started.

    Attributes:
        model: the DistributedModel.
        life, routing, gradients: of the model.
        optimizers: the state of each DistributedOptimizer.
        loss_scale: what `model.backward` multiplies losses by: the first optimizer says it.
        replicas: the copies of the model over which gradients are averaged.
        saves: its checkpoints under way.
        step_check: what compares its first steps with the plain model.
        recording: what records it to be compared with another run.
        call_context: what goes along with calls of modules on other ranks.
        clips_by_default: gradients of shards are clipped to a norm that nobody has set.
        loaded: a state was loaded into the model, and no step has been since.
        fixed_by: what relies on its layout, so that this cannot change: a clause for each.
        before_step: called before each step function, and each call of the model in training outside of one; may raise.
        change: what is asked for another layout, by its keys, in the place of `lamina.change()`; None for nothing.
        open_after: opens the session of another layout, in the place of that of its session; None: nothing does.
        lasting: what makes the things of `own` that whoever goes on in another layout has, too.
        on_end: what takes things out of torch, Python and the user's objects when the job ends, the latest first.
        closers: what is closed after the session. Each is told whether the process ends, and says whether all that it
            began has ended.
    """

    session: _lamina.Session
    model: Model = field(default_factory=Model)
    life: Life = field(default_factory=Life)
    routing: Routing = field(default_factory=Routing)
    gradients: Gradients = field(default_factory=Gradients)
    optimizers: list[Optimizer] = field(default_factory=list)
    loss_scale: _lamina.LossScale = field(default_factory=lambda: _lamina.LossScale(1.0))
    replicas: Replicas = field(default_factory=Replicas)
    saves: _lamina.Saves = field(default_factory=_lamina.Saves)
    step_check: StepCheck = field(default_factory=StepCheck)
    recording: Recording = field(default_factory=Recording)
    call_context: CallContext = field(default_factory=CallContext)
    clips_by_default: bool = False
    loaded: bool = False
    fixed_by: list[str] = field(default_factory=list)
    before_step: Callable[[], None] = lambda: None
    change: Callable[[dict[str, Any]], None] | None = None
    open_after: Callable[[_lamina.Config], _lamina.Session] | None = None
    lasting: list[Callable] = field(default_factory=list)
    on_end: ExitStack = field(default_factory=ExitStack)
    closers: list[Callable[[bool], bool]] = field(default_factory=list)
    _own: dict[Callable, Any] = field(default_factory=dict)

    def __post_init__(self):
        self._config = self.session.config  # the object, which knows its keys once they are asked for

    @property
    def has_model(self) -> bool:
        """True from when there is a DistributedModel."""
        return type(self.model) is not Model

    def state_of(self, optimizer: torch.optim.Optimizer) -> Optimizer | None:
        """The state of an optimizer that is a DistributedOptimizer of the job; None for any other one."""
        return next((known for known in self.optimizers if known.optimizer is optimizer), None)

    @property
    def partitioned_model(self) -> PartitionedModel | None:
        """The model with its owners; None before it is cut."""
        return self.life.model

    @property
    def microbatches(self) -> int:
        """Into how many a step cuts its batch."""
        return self.session.microbatches

    @property
    def pipelined(self) -> bool:
        """True where the model is cut over several ranks."""
        return self.session.group_size("partitions") > 1

    @property
    def sliced(self) -> bool:
        """True where layers of the model are cut over several ranks."""
        return self.session.group_size("tp") > 1

    @property
    def leads(self) -> bool:
        """True where this rank runs the bodies of step functions."""
        return self.session.leads

    def own(self, make: Callable[[], Made]) -> Made:
        """Returns what `make` gives when the job first asks for it: kept with the job, and gone with it."""
        if make not in self._own:
            self._own[make] = make()
        return self._own[make]

    def own_if_any(self, make: Callable[[], Made]) -> Made | None:
        """Returns what `own` has given; None where nobody has asked for it."""
        return self._own.get(make)

    def hand_on(self, changed: "Job") -> None:
        """Another job of the same training goes on in the place of this one."""
        changed.clips_by_default, changed.loss_scale = self.clips_by_default, self.loss_scale
        changed.before_step, changed.change, changed.open_after = self.before_step, self.change, self.open_after
        changed.lasting = self.lasting
        changed._own |= {make: self._own[make] for make in self.lasting if make in self._own}

    def close_rest(self, at_exit: bool = False) -> bool:
        """Closes what outlives the session. Returns whether all of it has ended."""
        return all([close(at_exit) for close in self.closers])


_job: Job | None = None
_beginnings: list[Callable[[Job], None]] = []  # of parts that a job may have from its beginning, of higher packages


def when_it_begins(call: Callable[[Job], None]) -> None:
    """Has something called with each job, when it begins."""
    _beginnings.append(call)


def begin(session: _lamina.Session) -> Job:
    """From now on there is a job."""
    global _job
    _job = Job(session)
    for call in _beginnings:
        call(_job)
    return _job


def end() -> None:
    """From now on there is none. Its session is for the caller to close."""
    global _job
    ended, _job = _job, None
    ended.on_end.close()


def is_initialized() -> bool:
    """True where `init` was called, and `shutdown` not since."""
    return _job is not None


def job() -> Job:
    """The current job. Raises UsageError before `init`."""
    if _job is None:
        raise refusal("not-initialised", "lamina.init()")
    return _job


def job_if_any() -> Job | None:
    """The current job; None before `init`."""
    return _job


def session() -> _lamina.Session:
    """The current session. Raises UsageError before `init`."""
    return job().session


def in_step() -> bool:
    """True where this thread runs a step body, or a module for another rank."""
    return _lamina.in_step()


def outside_step(what: str) -> Job:
    """The current job; raises UsageError inside a step function, where `what` is not allowed."""
    if in_step():
        raise refusal("inside-step", what)
    return job()


def everywhere(what: str) -> None:
    """Refuses in the body of a step function what every rank of a pipeline is to do: one rank alone runs it."""
    if _job is not None:
        _job.session.require_everywhere(what)


def before_cut(what: str) -> None:
    """Refuses what is to be said of a module before the model is cut over several ranks."""
    if _job is not None and _job.pipelined and _job.partitioned_model is not None:
        raise refusal("cut-already", what)
