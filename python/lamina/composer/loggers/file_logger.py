# SPDX-License-Identifier: Apache-2.0
"""A file for all that a rank says."""

import atexit
import errno
import os
import sys
import threading
import traceback
from typing import Any, TextIO

from lamina.composer.loggers.destination import LoggerDestination, format_log_data_value
from lamina.composer.loggers.tap import Tap
from lamina.dist import ranks
from lamina.errors import ConfigError, FileError
from lamina.trainer import checks
from lamina.util.files import own

_RANKS = ("rank", "local_rank", "world_size", "local_world_size", "node_rank")


class FileLogger(LoggerDestination):
    """Writes metrics, and this rank's stdout and stderr, into a file of its own. Output counts from here on; the file
    is there when the Trainer is. An error's traceback is in it, too.

    Args:
        filename: with `{run_name}`, `{rank}`, `{local_rank}`, `{world_size}`, `{local_world_size}` and `{node_rank}`.
        remote_file_name: None; files are not uploaded.
        capture_stdout, capture_stderr: whether output is in it.
        buffer_size: as `open` has it; 1: a line.
        log_traces: whether traces are in it.
        flush_interval: after how many batches, and epochs, the file is on the disk at the latest.
        overwrite: whether a file that is there may go.

    Errors:
        ConfigError: an unknown name in `filename`; when the Trainer is made, a file that is there.
        FileError: in its place is a link, or what else others may have put there.
    """

    def __init__(
        self,
        filename: str = "{run_name}/logs-rank{rank}.txt",
        remote_file_name: str | None = None,
        *,
        capture_stdout: bool = True,
        capture_stderr: bool = True,
        buffer_size: int = 1,
        log_traces: bool = True,
        flush_interval: int = 100,
        overwrite: bool = False,
    ):
        if remote_file_name is not None:
            raise ConfigError("FileLogger: remote_file_name: files are not uploaded; filename says where they are")
        self.filename_format = checks.path("FileLogger: filename", filename)
        self.overwrite, self.should_log_traces = checks.flag("FileLogger: overwrite", overwrite), log_traces
        self.buffer_size = checks.number("FileLogger: buffer_size", buffer_size, 1, whole=True)
        self.flush_interval = checks.number("FileLogger: flush_interval", flush_interval, 1, whole=True)
        self.file: TextIO | None = None
        self._name: str | None = None
        self._waiting: list[str] = []  # until there is a file
        self._begun: dict[str, str] = {}  # lines without an end, by prefix
        self._locks: dict[int, threading.RLock] = {}  # by process: a forked one may not wait for a thread that it lacks
        self._captured = [name for name, is_on in (("stdout", capture_stdout), ("stderr", capture_stderr)) if is_on]
        self._taps: list[Tap] = []
        self._named("any")
        self._capture()

    @property
    def filename(self) -> str:
        """The file's name.

        Errors:
            ConfigError: the run has no name yet, for there is no Trainer.
        """
        if self._name is None:
            raise ConfigError("FileLogger.filename: the run gets its name from the Trainer")
        return self._name

    def write(self, prefix: str, text: str) -> None:
        """Writes lines with a prefix; one without an end when that comes."""
        with self._locks.setdefault(os.getpid(), threading.RLock()):
            *lines, self._begun[prefix] = (self._begun.get(prefix, "") + text).split("\n")
            self._put("".join(f"{prefix}{line}\n" if line else "\n" for line in lines))

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.write(f"[metric][batch={step}]: ", f"{name}: {format_log_data_value(value)} \n")

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        for name, value in hyperparameters.items():
            self.write("[hyperparameter]: ", f"{name}: {format_log_data_value(value)} \n")

    def log_traces(self, traces: dict[str, Any]) -> None:
        for name, value in traces.items() if self.should_log_traces else ():
            self.write(f"[trace]: {name}:", f"{format_log_data_value(value)}\n")

    def init(self, state: Any, logger: Any) -> None:
        name, before = self._named(state.run_name), self._name
        if self.file is not None:
            self.file.close()  # of a Trainer that this one follows
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        mode = "a" if name == before else "w" if self.overwrite else "x"  # a second Trainer of the same name goes on
        try:
            self.file = open(name, mode, self.buffer_size, "utf-8", "backslashreplace", opener=own)  # noqa: SIM115
        except FileError as error:
            if error.errno != errno.EEXIST:
                raise
            raise ConfigError(
                f"FileLogger: {name} is there: overwrite=True replaces it, filename=... names another"
            ) from None
        self._name = name
        self._capture()
        waiting, self._waiting = self._waiting, []
        self._put("".join(waiting))

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch.value % self.flush_interval == 0:
            self._flush()

    def epoch_end(self, state: Any, logger: Any) -> None:
        if state.timestamp.epoch.value % self.flush_interval == 0:
            self._flush()

    def fit_end(self, state: Any, logger: Any) -> None:
        self._flush()

    def close(self, state: Any, logger: Any) -> None:
        if sys.exc_info()[0] is not None:  # it will be printed when nobody hears
            self.write("[stderr]: ", traceback.format_exc())
        self._end()

    def _end(self) -> None:
        atexit.unregister(self._end)
        while self._taps:
            self._taps.pop().close()
        for prefix in [prefix for prefix, line in self._begun.items() if line]:
            self.write(prefix, "\n")
        if self.file is not None:
            self._flush()
            self.file.close()
            self.file = None

    def _capture(self) -> None:
        streams = {} if self._taps else {name: getattr(sys, name) for name in self._captured}
        for name, stream in streams.items():
            if stream is not None:
                self._taps.append(Tap(stream, lambda text, prefix=f"[{name}]: ": self.write(prefix, text)))
        atexit.unregister(self._end)
        atexit.register(self._end)

    def _put(self, text: str) -> None:
        if self.file is None:
            self._waiting.append(text)
        else:
            self.file.write(text)

    def _flush(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def _named(self, run_name: str) -> str:
        known = {name: getattr(ranks, f"get_{'global_rank' if name == 'rank' else name}")() for name in _RANKS}
        try:
            return self.filename_format.format(run_name=run_name, **known)
        except (LookupError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"FileLogger: filename={self.filename_format!r}: {error}; names are run_name, {', '.join(_RANKS)}"
            ) from None
