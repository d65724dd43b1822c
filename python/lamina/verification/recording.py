# SPDX-License-Identifier: Apache-2.0
"""A job whose run is recorded, to be compared with another."""

import atexit
import multiprocessing
import os
import sys
import threading
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lamina import _lamina
from lamina.checkpoints.checkpointed_job import CheckpointedJob
from lamina.errors import said
from lamina.job import current, parts
from lamina.util import pytree
from lamina.verification.surroundings import Surroundings

# Seconds that a script is given after its last step, and threads after the main one.
_LATEST_END_S = 60
_LATEST_END_OF_THREADS_S = 5


class Recording(parts.Recording):
    """Tells the engine of what it cannot see of a recorded run: see `Recording` in
    lamina/job_checkpoint/record_job.h.

    It ends the script, with exit code 0, where the next step after the last one that is compared begins.
    """

    sees_calls = True

    def __init__(self, job: current.Job):
        self._job = job
        self._session = job.session
        self._engine = _lamina.Recording(self._session)
        self._looked_at = self._session.looked_at
        self._is_ending = False
        self._surroundings: dict[str, Surroundings] = {}
        job.on_end.callback(register_optimizer_step_pre_hook(self._before_update).remove)

    def begin_step(self) -> None:
        """Notes that a step function is called."""
        if self._engine.begin_step(*self._lent()):
            self._end_script()

    def begin_call(self) -> None:
        """Notes that a module is called."""
        if not current.in_step() and self._engine.begin_call(*self._lent()):
            self._end_script()

    def record_reads(self, name: str) -> None:
        """Records what the call of a module that has begun would find in the variables that its code reads, where the
        command asks for that module."""
        if name not in self._looked_at:
            return
        if name not in self._surroundings:
            self._surroundings[name] = Surroundings(self._job.partitioned_model, name)
        self._session.record_reads(name, self._surroundings[name].variables())

    def note_cut(self) -> None:
        """Notes that the model is cut, and has its values."""
        self._engine.note_cut(*self._lent())

    def see_results(self, outputs: list[Any]) -> None:
        """Takes what the body of a step returned for each microbatch."""
        self._engine.see_results([pytree.tensors(output) for output in outputs])

    def end_step(self) -> None:
        """Notes that a step function has done its work."""
        self._engine.end_step()

    def end(self) -> None:
        """Records what is left, where the job ends."""
        self._engine.end(*self._lent())

    def _lent(self) -> tuple[_lamina.Session, CheckpointedJob]:
        return self._session, CheckpointedJob(self._job)

    def _end_script(self) -> None:
        if self._is_ending:  # a script that goes on has caught the first one, as `except:` does
            self._leave()
        self._is_ending = True
        is_over = threading.Event()
        atexit.register(is_over.set)
        threading.Thread(target=self._leave_late, args=(is_over,), daemon=True).start()
        raise SystemExit(0)

    def _leave_late(self, is_over: threading.Event) -> None:
        """Ends a script that its end does not end: a thread of it waits for what no step brings any more."""
        threading.main_thread().join(_LATEST_END_S)
        if not is_over.wait(_LATEST_END_OF_THREADS_S):
            self._leave()

    def _leave(self) -> None:
        """Ends this process, with exit code 0."""
        self.end()
        self._session.tell_leaving(said("end-of-program"))
        for child in multiprocessing.active_children():  # workers that load data
            child.terminate()
            child.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._job.state_of(optimizer) is None:
            self._engine.before_update(*self._lent())


def begin(job: current.Job) -> None:
    """Has the job recorded, where `lamina verify` has started it."""
    if job.session.is_recorded:
        job.recording = Recording(job)


current.when_it_begins(begin)
