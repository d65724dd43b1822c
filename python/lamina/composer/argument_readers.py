# SPDX-License-Identifier: Apache-2.0
"""Readers of the Trainer's arguments: each takes a name and what was given, and gives what that stands for. Errors are
ConfigErrors that say what is expected."""

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lamina.errors import ConfigError
from lamina.job import current
from lamina.trainer import checks
from lamina.trainer.checkpoints import found_checkpoint
from lamina.trainer.time import EPOCH_OR_BATCH, Time, TimeUnit, named_time

Read = Callable[[str, Any], Any]
_MOST_PIECES = 2**31 - 1


def by(read: Callable[[Any], Any]) -> Read:
    """The reader that calls a function which knows no name."""
    return lambda _, given: read(given)


def optional(read: Read) -> Read:
    """The reader that leaves None as it is."""
    return lambda name, given: None if given is None else read(name, given)


def all_of(kind: type) -> Read:
    """The reader of one object of this kind, several, or None."""

    def read(_: str, given: Any) -> list[Any]:
        several = checks.listed(given)
        if wrong := [type(each).__name__ for each in several if not isinstance(each, kind)]:
            raise ConfigError(f"they are objects of {kind.__name__}, and not of {', '.join(wrong)}")
        return several

    return read


def optimizer(_: str, given: Any) -> torch.optim.Optimizer | None:
    """One optimizer, perhaps in a list."""
    several = checks.listed(given)
    if len(several) > 1 or not all(isinstance(each, torch.optim.Optimizer) for each in several):
        kinds = ", ".join(type(each).__name__ for each in several)
        raise ConfigError(f"it is one optimizer of torch's or of lamina's, not {kinds}")
    return several[0] if several else None


def duration(name: str, given: Any) -> Time:
    """How far a training goes."""
    return named_time(name, given, True, [unit for unit in TimeUnit if unit is not TimeUnit.DURATION])


def interval(name: str, given: Any) -> Time:
    """Epochs or batches between two moments."""
    return named_time(name, given, True, EPOCH_OR_BATCH)


def interval_or_function(name: str, given: Any) -> Time | Callable:
    """Epochs or batches, or a function of State and event."""
    return of_moments(name, given) if callable(given) else interval(name, given)


def of_moments(name: str, given: Callable) -> Callable:
    """A function of State and event."""
    try:
        inspect.signature(given).bind("state", "event")
    except TypeError:
        raise checks.wrong(name, given, "called with state and event, and takes others") from None
    except ValueError:  # it says nothing of its arguments
        pass
    return given


def seconds(name: str, given: Any) -> float:
    """A number of seconds."""
    if not checks.number(name, given) > 0:
        raise checks.wrong(name, given, "a number of seconds")
    return float(given)


def pieces(name: str, given: Any) -> int | str:
    """A number of microbatches or of samples in one, or "auto"."""
    is_word = isinstance(given, str) and given == "auto"
    if not is_word and (type(given) is not int or given < 1):
        raise ConfigError(f"{name}={given!r}: it is a number, 1 or more, or 'auto'")
    return given


def number_of_pieces(name: str, given: Any) -> int | str:
    """The number of microbatches of a batch; see `pieces`."""
    if isinstance(pieces(name, given), int) and given > _MOST_PIECES:
        raise checks.wrong(name, given, f"the number of microbatches of a batch, {_MOST_PIECES} at most")
    return given


def count_none_or_all(name: str, given: Any) -> int:
    """How many of them; 0: none; -1: all."""
    return given if type(given) is int and not given else checks.count_or_all(name, given)


def checkpoint(name: str, given: Any) -> str:
    """The path of a checkpoint, or of a folder of several."""
    path = checks.path(name, given)
    is_saving = current.is_initialized()  # perhaps there, by the Trainer before
    if not is_saving and not found_checkpoint(path).is_dir():
        raise checks.wrong(name, path, "a checkpoint that a Trainer has saved, or their folder: it is not there")
    return path


def run_name(name: str, given: Any) -> str:
    """The name of a run, which paths of its files have as a part: it leads out of no folder."""
    found = given if given == "" else checks.text(name, given)
    if found.startswith("/") or ".." in found.split("/") or not found.isprintable():
        raise checks.wrong(name, given, "a part of paths: of printable characters, without a / at its front and any ..")
    return found


def log_level(name: str, given: Any) -> str:
    """A level of Python's logging."""
    if not isinstance(logging.getLevelName(str(given).upper()), int):
        raise checks.wrong(name, given, "a level of Python's logging, such as 'info'")
    return given


def init_keys(name: str, given: Any) -> Mapping:
    """Keys of lamina.init."""
    if not isinstance(given, Mapping):
        raise checks.wrong(name, given, "a dictionary with keys of lamina.init")
    return given


def elastic(name: str, given: Any) -> tuple[int | str, list[str]]:
    """How often ranks with parts of the model keep these, and in which layouts they may go on, as JSON."""
    if given is not None and not isinstance(given, Mapping):
        raise checks.wrong(name, given, 'a dictionary with "keep_every" and "layouts"')
    own = {"keep_every": "auto", "layouts": ()} | dict(given or {})
    if unknown := sorted(map(str, own.keys() - {"keep_every", "layouts"})):
        raise ConfigError(f'it has "keep_every" and "layouts", and no {", ".join(unknown)}')
    every, layouts = own["keep_every"], own["layouts"]
    if every != "auto" and (type(every) is not int or every < 1):
        raise checks.wrong("keep_every", every, 'a whole number, 1 or more, or "auto"')
    if not isinstance(layouts, (list, tuple)) or not all(isinstance(each, Mapping) for each in layouts):
        raise checks.wrong("layouts", layouts, "a list of dictionaries with keys of lamina.change()")
    if any("microbatches" in each for each in layouts):
        raise ConfigError("layouts: grad_accum and device_train_microbatch_size say how many microbatches")
    return every, [json.dumps(dict(each)) for each in layouts]
