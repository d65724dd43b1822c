# SPDX-License-Identifier: Apache-2.0
"""Trainings that outlive ranks: see [Note: ranks that are left] in lamina/session/next_epoch.h."""

import os
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lamina import _lamina
from lamina.errors import PeerError, UsageError
from lamina.job import current, lifetime
from lamina.pipeline.distributed_model import DistributedModel
from lamina.util.told import tell

Result = TypeVar("Result")

_HEARD_S, _EACH_S = 2.0, 0.01  # how long a loss may take to be heard of here; looks at each rank


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

    Attributes:
        updates: steps of the optimizer that count.

    Errors:
        UsageError: a model in parts, or with parts of states: what a lost rank had nobody else has.
    """

    def __init__(self, model: DistributedModel, optimizer: torch.optim.Optimizer, *, schedule: Any = None):
        job = current.outside_step("lamina.Run()")
        if job.model is not model or [state.optimizer for state in job.optimizers] != [optimizer]:
            raise _refused("it takes the job's DistributedModel, and its only optimizer, a DistributedOptimizer")
        _require_copies(job)
        self.updates = 0
        self._model, self._schedule = model, schedule
        (self._state,) = job.optimizers
        self._state.after_step = self._note
        self._is_whole = True  # what is here is of one update
        self._kept: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._seeded: int | None = None
        self._keep()

    def elastic(self, train: Callable[[int], Result]) -> Result:
        """Calls `train` with the number of updates so far, and again after each loss. Returns what it returns.

        Errors:
            PeerError: a rank was lost, and too few are left, or what it had is lost with it.
        """
        while True:
            try:
                return train(self.updates)
            except PeerError as error:
                lost: PeerError = error
            while lost is not None:
                lost = self._go_on(lost)

    def _note(self) -> None:
        self.updates += 1
        self._keep()

    def _keep(self) -> None:
        """Notes what a batch changes besides the parameters, where it has been changed."""
        buffers = list(self._model.buffers())
        if len(buffers) != len(self._kept):
            self._kept, self._versions = [buffer.clone() for buffer in buffers], [each._version for each in buffers]
        for number, buffer in enumerate(buffers):
            if self._versions[number] != buffer._version:
                self._kept[number].copy_(buffer)
                self._versions[number] = buffer._version
        self._seeded = current.session().seeded_steps

    @torch.no_grad()
    def _bring_back(self) -> None:
        for buffer, kept in zip(self._model.buffers(), self._kept, strict=True):
            buffer.copy_(kept)
        for parameter in self._model.parameters():
            parameter.grad = None

    def _go_on(self, lost: PeerError) -> PeerError | None:
        """Goes on with the ranks that are left. Returns the error of a further loss meanwhile."""
        job = current.job()
        if job.model is not self._model or not _has_lost(job.session):
            raise lost
        _require_copies(job)
        job.saves.drop()
        end, epochs = _lamina.EpochEnd(job.session), int(os.environ.get("LAMINA_EPOCH", "0"))
        while True:
            with socket.socket() as reserved:
                reserved.bind(("127.0.0.1", 0))
                word = (self.updates, reserved.getsockname()[1])
                next_ = end.next(word, self.updates if self._is_whole else -1)
            try:
                if not self._is_whole and next_.rank == 0:
                    raise lost  # the states of all others were lost with those who had them
                _set_place(next_, epochs)
                session = end.open(next_)
                break
            except PeerError as error:
                if error is lost:
                    raise
        try:
            self._go_over(job, session, [word[0] for word in next_.words])
        except PeerError as error:
            return error
        return None

    def _go_over(self, job: current.Job, session: _lamina.Session, updates: list[int]) -> None:
        before, size = job.session.rank, job.session.size
        self._bring_back()
        job.gradients.let_go()
        self._state.let_go(with_states=True)
        changed = lifetime.go_over(job, session)
        self._model.go_on_in(changed)
        self._state.go_on_in(changed)
        self._is_whole = updates[session.rank] == updates[0]
        changed.life.make()
        if len(set(updates)) > 1:
            _, told = session.first_given("world", self._told() if session.rank == 0 else None)
            self._take(told)  # the first one, too: optimizers count what was loaded into them
        if self._seeded is not None:
            session.seeded_steps = self._seeded
        self.updates, self._is_whole = updates[0], True
        self._keep()
        if session.rank == 0:
            tell(
                f"{session.size} of {size} copies are left, and go on after update {self.updates}, with what rank "
                f"{before} had"
            )

    def _told(self) -> tuple[Any, Any, int | None]:
        schedule = None if self._schedule is None else self._schedule.state_dict()
        return self._state.optimizer.state_dict(), schedule, self._seeded

    def _take(self, told: tuple[Any, Any, int | None]) -> None:
        states, schedule, self._seeded = told
        self._state.optimizer.load_state_dict(states)
        if self._schedule is not None:
            self._schedule.load_state_dict(schedule)


def _refused(why: str) -> UsageError:
    return UsageError(f"lamina.Run: {why}", code="elastic-refused")


def _has_lost(session: _lamina.Session) -> bool:
    """True where a rank is lost to this one, too: others may have heard of it first."""
    by = time.monotonic() + _HEARD_S
    while time.monotonic() < by:
        if any(session.loss(rank, _EACH_S) for rank in range(session.size) if rank != session.rank):
            return True
    return False


def _set_place(next_: "_lamina.NextEpoch", epochs: int) -> None:
    """Has the environment say who this rank is from now on, as a launcher does."""
    size, port = len(next_.words), next_.words[0][1]
    told = {"RANK": next_.rank, "LOCAL_RANK": next_.rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LAMINA_EPOCH": epochs + next_.number}
    os.environ.update({name: str(value) for name, value in told.items()})


def _require_copies(job: current.Job) -> None:
    """UsageError where a lost rank has something that no other one has."""
    config = job.session.config
    parts = {
        "partitions": config.partitions > 1,
        "tensor_parallel_degree": config.tensor_parallel_degree > 1,
        "sharded_data_parallel_degree": config.sharded_data_parallel_degree > 1,
        "shard_optimizer_state": config.shard_optimizer_state,
    }
    if named := [name for name, is_on in parts.items() if is_on]:
        raise _refused(f"{named[0]} gives ranks parts that no other one has, and that are lost with a rank")
    if job.session.group_size("node") < job.session.size:
        raise _refused("it knows ranks of one machine alone yet")
    if not config.ddp:
        raise _refused("without ddp each rank trains by itself")
