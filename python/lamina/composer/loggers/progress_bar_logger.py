# SPDX-License-Identifier: Apache-2.0
"""How far a training is: a bar on a terminal, a line now and then elsewhere."""

import importlib.util
import os
import sys
import time
from typing import Any, TextIO

from lamina.composer.loggers.destination import LoggerDestination, format_log_data_value, numbers, text_stream
from lamina.composer.loggers.tap import Tap
from lamina.dist.ranks import get_global_rank
from lamina.trainer.time import TimeUnit

_LINE_EVERY_S, _BAR_EVERY_S = 10.0, 0.1


class ProgressBarLogger(LoggerDestination):
    """Shows how far a training or an evaluation is, on world rank 0. That is a bar below what is printed, where rich is
    installed and the stream is a terminal. Else it is a line each ten seconds, and at the end of each epoch and
    evaluation.

    Args:
        stream: "stdout", "stderr" or a file.
    """

    def __init__(self, stream: str | TextIO = "stderr"):
        self.stream = text_stream(stream)
        self._view: _Bar | _Lines | None = None
        self._metrics: dict[str, Any] = {}
        self._evaluated = 0  # batches

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._metrics |= metrics

    def fit_start(self, state: Any, logger: Any) -> None:
        if self._view is None and get_global_rank() == 0:
            self._view = _bar_on(self.stream) or _Lines(self.stream)

    def batch_end(self, state: Any, logger: Any) -> None:
        now, most = state.timestamp, state.max_duration
        of = f" of {most.value}" if most is not None and most.unit is TimeUnit.EPOCH else ""
        done, all = now.batch_in_epoch.value, state.dataloader_len
        self._show(f"epoch {now.epoch.value + 1}{of}", done, all, "loss/train", is_last=done == all)

    def eval_start(self, state: Any, logger: Any) -> None:
        self._evaluated = 0
        self.fit_start(state, logger)

    def eval_batch_end(self, state: Any, logger: Any) -> None:
        self._evaluated += 1
        self._show(f"evaluation of {state.dataloader_label}", self._evaluated, state.dataloader_len, is_last=False)

    def eval_end(self, state: Any, logger: Any) -> None:
        what, count = f"evaluation of {state.dataloader_label}", self._evaluated
        self._show(what, count, count, f"metrics/{state.dataloader_label}/", is_last=True)

    def close(self, state: Any, logger: Any) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    def _show(self, what: str, done: int, total: int | None, kind: str | None = None, *, is_last: bool) -> None:
        if self._view is not None and self._view.is_due(is_last):
            known = numbers(self._metrics).items() if kind is not None else ()
            values = [f"{name} {format_log_data_value(value)}" for name, value in known if name.startswith(kind)]
            self._view.show(what, done, total, ", ".join(values))


class _Lines:
    def __init__(self, stream: TextIO):
        self._stream = stream
        self._last = "", 0, time.monotonic()  # what was shown, how many batches of it, when

    def is_due(self, is_last: bool) -> bool:
        return is_last or time.monotonic() - self._last[2] >= _LINE_EVERY_S

    def show(self, what: str, done: int, total: int | None, values: str) -> None:
        before, count, since = self._last
        now = time.monotonic()
        speed = (done - (count if what == before else 0)) / max(now - since, 1e-9)
        self._last = what, done, now
        of = "" if total is None else f" of {total}"
        speed_words = f"{speed:.3g} batches a second" if speed > 0 else ""
        words = [what, f"batch {done}{of}", speed_words, values]
        print(", ".join(filter(None, words)), file=self._stream, flush=True)

    def close(self) -> None:
        pass


def _bar_on(stream: TextIO) -> "_Bar | None":
    """A bar, where there can be one."""
    if not stream.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console

    # A file of its own: what is drawn is nothing that is printed.
    console = Console(file=os.fdopen(os.dup(stream.fileno()), "w"))
    if console.is_interactive:
        return _Bar(console)
    console.file.close()
    return None


class _Bar:
    """A bar of rich's, which text erases on its way to the terminal; it is drawn again below that."""

    def __init__(self, console: Any):
        from rich import progress

        columns = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn()
        more = progress.TimeRemainingColumn(), progress.TextColumn("{task.fields[values]}")
        self._console = console
        self._bar = progress.Progress(
            *columns, *more, console=console, auto_refresh=False, transient=True, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip
        self._task, self._what = self._bar.add_task("", values=""), ""
        self._is_shown, self._at_line_start, self._last_s = False, True, 0.0
        self._taps = [
            Tap(each, self._make_room) for each in (sys.stdout, sys.stderr) if each is not None and each.isatty()
        ]

    def is_due(self, is_last: bool) -> bool:
        return is_last or time.monotonic() - self._last_s >= _BAR_EVERY_S

    def show(self, what: str, done: int, total: int | None, values: str) -> None:
        self._last_s = time.monotonic()
        if what != self._what:
            self._what = what
            self._bar.reset(self._task, description=what, total=total)
        self._bar.update(self._task, completed=done, total=total, values=values)
        if self._at_line_start and not self._is_shown:
            self._is_shown = True
            self._bar.start()
        if self._is_shown:
            self._bar.refresh()

    def close(self) -> None:
        for tap in self._taps:
            tap.close()
        self._erase()
        self._console.file.close()

    def _make_room(self, text: str) -> None:
        self._erase()
        self._at_line_start = text.endswith("\n") if text else self._at_line_start

    def _erase(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._bar.stop()
