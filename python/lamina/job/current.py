# SPDX-License-Identifier: Apache-2.0
"""The current job: from `init` to `shutdown`. The only global state of the package."""

from __future__ import annotations

import atexit
import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lamina import _lamina
from lamina.errors import ConfigError, UsageError
from lamina.exits import excepthook, interrupts
from lamina.modules import runs
from lamina.remote import closures
from lamina.torch_patches import averages, clipping, compiled, foreign, module_attributes, module_call, swapping
from lamina.util import call_sites

if TYPE_CHECKING:
    from lamina.data_parallel.replicas import Replicas
    from lamina.job.groups import ProcessGroups
    from lamina.optim.optimizer_state import OptimizerState
    from lamina.pipeline.cut import Cut
    from lamina.pipeline.distributed_model import DistributedModel


@dataclass
class Job:
    """What one `init` started."""

    session: _lamina.Session
    microbatches: int
    model: DistributedModel | None = None
    cut: Cut | None = None  # the model's
    optimizers: list[OptimizerState] = field(default_factory=list)
    groups: ProcessGroups | None = None  # from the first use
    replicas: Replicas | None = None  # where gradients are averaged over several copies of the model
    uneven: UsageError | None = None  # in a step of fewer microbatches than configured: what a backward is
    loaded: bool = False  # a state was loaded into the model, and no step has been since

    @property
    def pipelined(self) -> bool:
        """Whether the model is cut over several ranks."""
        return self.session.group_size("pp") > 1

    @property
    def leads(self) -> bool:
        """Whether this rank runs the bodies of step functions."""
        return self.session.group_rank("pp") == 0


_job: Job | None = None
_process = 0  # that called init: a fork of it must not end its session
_stuck = False  # a thread is still in the body of a step that failed


def init(config: Mapping[str, Any] | None = None, /, **keys: Any) -> None:
    """Starts lamina in this process; every process of the job calls it.

    A second call without configuration, or with the same, does nothing. Started without a launcher, the process is a
    job of its own. In a job of one process degrees above 1 become 1, and one warning says so.

    Args:
        config: the keys of docs/configuration.md, either bare or as `{"enabled": ..., "parameters": {...}}`. The
            environment variable SM_HP_MP_PARAMETERS, when it says anything, counts instead.
        **keys: the same as keyword arguments: `init(partitions=2, microbatches=8, schedule="interleaved")`.

    Errors:
        ConfigError: wrong keys, all of them named at once; both forms at once; a configuration that differs from that
            of an earlier call.
        PeerError, TimeoutError: the ranks did not find each other.
    """
    global _job, _process
    text = _to_json(config, keys)
    if _job is not None:
        if text != "{}":
            _require_same(_job.session.config, text)
        return
    parsed, notes = _lamina.parse_config(text)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    session = _lamina.Session(parsed)
    _job = Job(session, parsed.microbatches)
    excepthook.install(session)
    if (replicas := session.group_size("dp")) > 1 and session.rank == 0 and not parsed.ddp:
        warnings.warn(
            f"{replicas} replicas of the model train apart: their gradients are not averaged without ddp: true",
            stacklevel=2,
        )
    if not _process:
        atexit.register(_at_exit)
    _process = os.getpid()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return _job is not None


def shutdown() -> None:
    """Ends what `init` started; every rank calls it. Afterwards `init` may be called again. Does nothing when there is
    nothing to end.

    Errors:
        UsageError: called inside a step function.
    """
    global _stuck
    if _job is not None:
        outside_step("shutdown()")
        groups = _job.groups
        _job.session.tell_leaving(f"called lamina.shutdown() at {call_sites.where()}")
        _stuck = not _end().close(True) or _stuck
        _stuck = (groups is not None and not groups.close()) or _stuck


def job() -> Job:
    """The current job. Raises UsageError before `init`."""
    if _job is None:
        raise UsageError("lamina is not initialised in this process: call lamina.init() first")
    return _job


def session() -> _lamina.Session:
    """The current session. Raises UsageError before `init`."""
    return job().session


def in_step() -> bool:
    """Whether this thread runs a step body, or a module for another rank."""
    return _lamina.in_step()


def outside_step(what: str) -> Job:
    """The current job; raises UsageError inside a step function, where `what` is not allowed."""
    if in_step():
        raise UsageError(
            f"{what} was called inside a step function, which runs once per microbatch and on one rank of the pipeline "
            "only: call it before or after the step"
        )
    return job()


def everywhere(what: str) -> None:
    """Refuses in the body of a step function what every rank of a pipeline is to do: one rank alone runs it."""
    if _job is not None:
        _job.session.require_everywhere(what)


def _to_json(config: Mapping[str, Any] | None, keys: dict[str, Any]) -> str:
    if config is not None and keys:
        raise ConfigError(f"init() takes a dictionary or keyword arguments, not both; keywords: {', '.join(keys)}")
    given = keys if config is None else config
    if not isinstance(given, Mapping):
        raise ConfigError(f"init() takes a dictionary, not {type(given).__name__}")
    try:
        return json.dumps(dict(given))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the configuration cannot be written as JSON: {error}") from None


def _require_same(current: _lamina.Config, text: str) -> None:
    asked, _ = _lamina.parse_config(text)
    if difference := current.differences(asked):
        raise ConfigError(
            f"init() was called before with another configuration; call shutdown() first to change it. "
            f"Then and now: {difference}"
        )


def _end() -> _lamina.Session:
    """Ends the current job; its session is for the caller to close."""
    global _job
    ended, _job = _job, None
    if ended.replicas is not None:
        ended.replicas.unwatch()
    module_call.remove()
    runs.remove()
    module_attributes.remove()
    swapping.remove()
    closures.remove()
    excepthook.remove()
    clipping.remove()
    averages.remove()
    foreign.remove()
    compiled.remove()
    return ended.session


def _at_exit() -> None:
    """Ends the threads. The peers learn of the end of this process from the system, when it has ended: so whoever looks
    for the first cause finds this process first."""
    if os.getpid() != _process:
        return
    groups = _job.groups if _job is not None else None
    last_error = getattr(sys, "last_value", None)
    interrupted = interrupts.is_interrupt(last_error)
    if _job is not None and last_error is None:
        _job.session.tell_leaving("came to the end of its program")
    if interrupted:
        excepthook.end_without_collecting()
    if (_job is None or _end().leave(interrupted)) and not _stuck and (groups is None or groups.close(at_exit=True)):
        return
    # Python cannot end around a thread that never comes back from the user's code: the process can.
    print("lamina: what a failed step began did not end; ending the process around it", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(interrupts.INTERRUPTED if interrupted else 1)
