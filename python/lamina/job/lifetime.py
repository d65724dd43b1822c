# SPDX-License-Identifier: Apache-2.0
"""The beginning and the end of a job: `init`, `shutdown`, and the end of the process."""

import atexit
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lamina import _lamina
from lamina.errors import ConfigError, Error, refusal, said
from lamina.exits import excepthook, failures
from lamina.job import current, groups
from lamina.util import call_sites
from lamina.util.told import tell

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lamina.job.keys import Keys

_LATE_S = 2.0  # that others may come to collectives of this rank at its orderly end

_process = 0  # that called init: a fork of it must not end its session
_stuck = False  # a thread is still in the body of a step that failed
_left = False  # a collective that was given up goes on
_ends = threading.RLock()  # held by the thread that shuts down; a handler of a signal may, too, meanwhile


def init(config: Mapping[str, Any] | None = None, /, **keys: "Unpack[Keys]") -> None:
    """Starts lamina in this process; every process of the job calls it.

    A second call without configuration, or with the same, does nothing. Started without a launcher, the process is a
    job of its own, unless torch's default group, at MASTER_ADDR and MASTER_PORT, says which of several ranks it is. In
    a job of one process degrees above 1 become 1, and one warning says so.

    Args:
        config: the keys of docs/configuration.md, either bare or as `{"enabled": ..., "parameters": {...}}`. The
            first of the environment variables LAMINA_CONFIG and SM_HP_MP_PARAMETERS that says anything counts
            instead, and a warning names the keys that have no effect then.
        **keys: the same as keyword arguments: `init(partitions=2, microbatches=8, schedule="interleaved")`.

    Errors:
        ConfigError: wrong keys, all of them named at once; both forms at once; a configuration that differs from that
            of an earlier call.
        PeerError, TimeoutError: the ranks did not find each other.
    """
    start(config, keys)


def start(
    config: Mapping[str, Any] | None,
    keys: dict[str, Any],
    taken: Callable[[_lamina.Config], _lamina.Config] = lambda read: read,
) -> None:
    """`init`, of which another face calls it: it takes a configuration as `taken` says."""
    global _process
    text = _to_json(config, keys)
    if current.is_initialized():
        if text != "{}":
            _require_same(current.session().asked, taken(_lamina.parse_config(text)[0]))
        return
    parsed, notes, given = _lamina.parse_config(text)
    for note in notes:
        warnings.warn(note, stacklevel=3)
    parsed = taken(parsed)
    groups.take_ranks()
    session = _lamina.Session(parsed)
    os.environ.pop("LAMINA_SECRET_FD", None)  # it is read: libraries that put the environment back are not to bring it
    job = current.begin(session)
    job.clips_by_default = "sdp_gradient_clipping" not in given
    excepthook.install(session)
    job.on_end.callback(excepthook.remove)
    if not _process:
        atexit.register(_at_exit)
    _process = os.getpid()


def go_over(job: current.Job, session: _lamina.Session) -> current.Job:
    """Begins a job of the same ranks in that layout in the place of this one, whose session has opened the other's;
    collective over the world."""
    global _stuck, _left
    with _ends:
        foreign = groups.foreign_of_torch(job)
        job.session.await_device()
        current.end()
        _stuck = not job.session.close(True) or _stuck
        _left = not job.close_rest() or _left
        session.take_over()
        changed = current.begin(session)
        job.hand_on(changed)
        excepthook.install(session)
        changed.on_end.callback(excepthook.remove)
        if foreign and session.rank == 0:
            tell(f"lamina.change() has ended {foreign} process groups that the script has made: make them again")
        return changed


def require_config(config: Mapping[str, Any]) -> None:
    """Errors: ConfigError: wrong keys, as `init` tells them; nothing is started."""
    _lamina.parse_config(_to_json(config, {}))


def shutdown() -> None:
    """Ends what `init` started; every rank calls it. Afterwards `init` may be called again. Does nothing when there is
    nothing to end.

    Errors:
        UsageError: called inside a step function.
    """
    global _stuck, _left
    with _ends:
        if not current.is_initialized():
            return
        job = current.outside_step("shutdown()")
        try:
            job.saves.end()
            job.recording.end()
            job.session.await_device()
        finally:
            job.session.tell_leaving(f"called lamina.shutdown() at {call_sites.where()}")
            current.end()
            _await_others(job.session, failed=sys.exc_info()[0] is not None)
            _stuck = not job.session.close(True) or _stuck
            _left = not job.close_rest() or _left


def _to_json(config: Mapping[str, Any] | None, keys: dict[str, Any]) -> str:
    if config is not None and keys:
        raise ConfigError(f"init() takes a dictionary or keyword arguments, not both; keywords: {', '.join(keys)}")
    given = keys if config is None else config
    if not isinstance(given, Mapping):
        raise ConfigError(f"init() takes a dictionary, not {type(given).__name__}")
    try:
        return json.dumps({key: str(one) if isinstance(one, torch.device) else one for key, one in given.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the configuration cannot be written as JSON: {error}") from None


def _require_same(first: _lamina.Config, asked: _lamina.Config) -> None:
    if difference := first.differences(asked):
        raise refusal("other-configuration", difference, kind=ConfigError)


def _at_exit() -> None:
    """Ends the threads. The peers learn of the end of this process from the system, when it has ended: so whoever looks
    for the first cause finds this process first."""
    if os.getpid() != _process:
        return
    if _lamina.device_has_failed():  # what lies on it is not to be freed, and nothing ends that waits for it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    last_error = getattr(sys, "last_value", None)
    interrupted = failures.is_interrupt(last_error)
    job = current.job_if_any()
    if job is not None:
        _end_saves(job, last_error is None)
    if job is not None and last_error is None:
        job.recording.end()
        job.session.tell_leaving(said("end-of-program"))
    if interrupted:
        excepthook.end_without_collecting()
    ended = (job is None or _leave(job, interrupted, last_error is not None)) and not _stuck
    if ended and not _left and (job is None or job.close_rest(at_exit=True)):
        return
    # Python cannot end around a thread that never comes back from the user's code: the process can.
    tell("what a failed step began did not end; ending the process around it")
    sys.stdout.flush()
    sys.stderr.flush()
    if ended and last_error is None:  # but for groups, which wait in their ends; the exit code is the script's
        excepthook.end_without_collecting()
        _lamina.end_with_python(groups.all_of_torch())
        return
    os._exit(failures.INTERRUPTED if interrupted else 1)


def _end_saves(job: current.Job, finish: bool) -> None:
    """Waits for a checkpoint that is being saved, or drops it where the program has failed."""
    if not finish:
        return job.saves.drop()
    try:
        job.saves.end()
    except (Error, KeyboardInterrupt) as error:
        kind = type(error).__name__
        tell(f"the last checkpoint was not saved: {kind}: {error}")


def _leave(job: current.Job, interrupted: bool, failed: bool) -> bool:
    current.end()
    _await_others(job.session, failed)
    return job.session.leave(interrupted)


def _await_others(session: _lamina.Session, failed: bool) -> None:
    """Waits a moment for collectives that this rank has begun ahead of the others. Where it has failed, these may never
    come to them."""
    by = time.monotonic() + _LATE_S
    while not failed and session.stuck and time.monotonic() < by:
        pass  # which takes its time
