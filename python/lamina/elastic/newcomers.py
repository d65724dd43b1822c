# SPDX-License-Identifier: Apache-2.0
"""Processes that join copies of a model which train: see [Note: newcomers] in lamina/session/door.h."""

import contextlib
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lamina import _lamina
from lamina.job import current
from lamina.util.told import tell

_NEWCOMER, _TERMS = "LAMINA_NEWCOMER", "LAMINA_ELASTIC"


class EpochOverError(Exception):
    """Ends an epoch of a training, on all copies after the same update: newcomers come in, or copies leave."""


class Doorway:
    """The door of the job, which is at its first copy, as each copy knows it.

    Args:
        model, optimizer: of the training.
        shares_any: whether copies share out any number of microbatches.

    Attributes:
        leaves: whether this copy wants to leave.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, shares_any: bool):
        self._own = _facts(model, optimizer)
        self._shares_any = shares_any
        self._trainings = 0
        self._most = int(os.environ.get(_TERMS, "").partition(":")[2] or 0)
        self.door: _lamina.Door | None = None
        self.leaves = False

    def begin(self) -> None:
        """A training of the script begins: newcomers come to the same one."""
        self._trainings += 1

    @property
    def _facts(self) -> list[tuple[str, str]]:
        return [*self._own, ("place in its script", f"training number {self._trainings}")]

    def begin_epoch(self) -> None:
        """The door is at the first rank of the current job."""
        session = current.session()
        _lamina.forget_newcomers()
        if self._most == 0 or session.rank != 0:
            self.door = None
            return
        self.door = self.door or _lamina.Door.open(session, self._facts)
        if self.door is not None:
            self.door.set_terms(session, self._most, self._shares_any)
            self.door.tell(session)

    def is_called(self) -> bool:
        """Tells whether newcomers wait: all copies alike, between the last pass of an update and the next one."""
        if current.session().size == 1:
            return self.leaves or (self.door is not None and self.door.has_waiting)
        _lamina.hear_of_door(current.session())
        return _lamina.newcomers_wait()

    def end(self) -> None:
        """The training is over."""
        if self.door is not None:
            self.door.end()
            self.door = None
        elif self._most:
            _lamina.end_door(current.session())

    @contextlib.contextmanager
    def leaving_by_sigterm(self, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Inside, SIGTERM has this copy leave in order, unless the script has said what that does. `then` is called."""
        is_main = threading.current_thread() is threading.main_thread()
        if _TERMS not in os.environ or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return

        def leave(*_: object) -> None:
            self.leaves = True
            _lamina.want_to_leave(True)
            then()

        signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _lamina.want_to_leave(False)
            if self.leaves:  # the training was over before
                self.leaves = False
                os.kill(os.getpid(), signal.SIGTERM)

    def end_if_told(self) -> None:
        """A rank is lost: ends this process, too, where SIGTERM has told it to leave. Perhaps the launcher ends all."""
        if self.leaves:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def leave(self, goes_on: bool) -> None:
        """This copy is none of those who go on, if any do.

        Errors:
            SystemExit: always.
        """
        self.leaves = False
        if self.door is not None:
            if not goes_on:
                self.door.end()
            self.door = None
        if goes_on:
            _lamina.tell_leaving()
        tell("told by SIGTERM to end: this rank has left, after an update that counts")
        raise SystemExit(0 if goes_on else 128 + signal.SIGTERM)

    def newcomer(self) -> _lamina.Newcomer:
        """This process, as one that joins."""
        return _lamina.Newcomer(current.session(), self._facts)


def is_one() -> bool:
    """Tells whether this process is to join a job, in which it is not yet."""
    return _NEWCOMER in os.environ


def take_place(place: "_lamina.NewPlace | None") -> None:
    """Has the environment say the place; ends the process where there is none, because the job is over.

    Errors:
        SystemExit: that end.
    """
    if place is None:
        tell("the job was over before this process could join it")
        raise SystemExit(0)
    os.environ.pop(_NEWCOMER, None)
    os.environ.update(_lamina.take_newcomers_place(current.session(), place))


def set_place(before: _lamina.Session, next_: _lamina.NextEpoch, port: int, epoch: int) -> None:
    """Has the environment say who this rank is from now on, as a launcher does."""
    os.environ.update(_lamina.take_place(before, next_, port, epoch))


def _facts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    """Facts that newcomers have in common with the job, besides versions and configuration."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    text = Path(script).read_bytes() if script is not None and Path(script).is_file() else b""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lines = [f"{name} {str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for name, each in tensors]
    groups = [f"a group of {len(group['params'])} parameters" for group in optimizer.param_groups]
    return [
        ("script (SHA-256)", hashlib.sha256(text).hexdigest()),
        ("model", "\n".join(lines)),
        ("optimizer", "\n".join([type(optimizer).__name__, *groups])),
    ]
