# SPDX-License-Identifier: Apache-2.0
"""A job whose run is recorded, to be compared with another."""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lamina import _lamina
from lamina.checkpoints.checkpointed_job import CheckpointedJob
from lamina.job import current
from lamina.util import pytree
from lamina.verification.surroundings import Surroundings


class Recording:
    """Tells the engine of what it cannot see of a recorded run: see [Note: recorded runs] in
    lamina/verification/run_recorder.h.

    It ends the script, with exit code 0, where the next step after the last one that is compared begins.
    """

    def __init__(self, job: current.Job):
        self._job = job
        self._session = job.session
        self._surroundings: Surroundings | None = None
        job.on_end.callback(register_optimizer_step_pre_hook(self._before_update).remove)

    def begin_step(self) -> None:
        """Notes that a step function is called."""
        self._record_news()
        self._session.begin_recorded_step()

    def begin_call(self) -> None:
        """Notes that a module is called."""
        if not current.in_step():
            self._record_news()

    def record_reads(self, name: str) -> None:
        """Records what the call of a module that has begun would find in the variables that its code reads, where the
        command asks for that module."""
        if name != self._session.module_looked_at:
            return
        if self._surroundings is None:
            self._surroundings = Surroundings(self._job.partitioned_model, name)
        self._session.record_reads(name, self._surroundings.variables())

    def record_results(self, outputs: list[Any]) -> None:
        """Takes what the body of a step returned for each microbatch."""
        for microbatch, output in enumerate(outputs):
            self._session.record_result(microbatch, pytree.tensors(output))

    def end_step(self) -> None:
        """Notes that a step function has done its work."""
        self._session.end_recorded_step()

    def record(self) -> None:
        """Records the model and its optimizers as they are."""
        _lamina.record_state(self._session, CheckpointedJob(self._job))

    def end(self) -> None:
        """Records what is left, where the job ends."""
        if self._session.has_news_to_record:
            self.record()
        self._session.end_recording()

    def _record_news(self) -> None:
        if not self._session.has_news_to_record:
            return
        self.record()
        if self._session.recorded_all:
            raise SystemExit(0)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if all(known.optimizer is not optimizer for known in self._job.optimizers):
            _lamina.record_gradients(self._session, CheckpointedJob(self._job))


def begin(job: current.Job) -> None:
    """Has the job recorded, where `lamina verify` has started it."""
    if job.session.is_recorded:
        job.recording = Recording(job)


current.when_it_begins(begin)
