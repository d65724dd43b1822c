# SPDX-License-Identifier: Apache-2.0
"""Numbers of a training run, step by step: how long, how idle, how much was sent, how much memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from lamina import _lamina
from lamina.errors import ConfigError, UsageError
from lamina.job import current
from lamina.util.checks import require_local
from lamina.util.files import own


class Logger(Protocol):
    """A sink for the numbers of steps; `JsonLines` and `TensorBoard` are two."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of one step. Steps count from 0."""

    def close(self) -> None:
        """Nothing comes after."""


class JsonLines:
    """A line of JSON per step."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require_local(path=path)
        self._file = open(path, "w", buffering=1, opener=own)  # noqa: SIM115 - closed by close()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard's event files: `pip install lamina[tensorboard]`.

    Errors:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils import tensorboard
        except ImportError as error:
            raise ConfigError("TensorBoard is not installed: pip install lamina[tensorboard]") from error
        self._folder, self._new_writer, self._writer = os.fspath(folder), tensorboard.SummaryWriter, None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:  # only where something is logged
            self._writer = self._new_writer(self._folder)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Metrics:
    """Writes the numbers of each step, on each rank, into `folder/rank-N.jsonl`, and a summary at the end.

        with lamina.Metrics("metrics") as metrics:
            for x, y in batches:
                loss = train_step(x, y).reduce_mean()
                optimizer.step()
                metrics.step(samples=len(x), loss=loss.item())

    A line has `step`; `time_s`, since the line before; `step_s`, this rank's time in step functions; and `bubble`, the
    share of `step_s` in which it did not compute. `samples_per_s` and `tokens_per_s` are of this rank's batches, where
    `step` is told how many there were. `messages` and `sent_bytes` went to other ranks in steps, and `memory_bytes` is
    the most that its process had. Further entries are those that `step` is given.

    Every rank of the job makes one, and closes it. docs/timeline.md says more.

    Args:
        folder: made where it is missing.
        loggers: take the lines of world rank 0 too; closed with this.

    Errors:
        UsageError: before `init`, inside a step function, or an address of a store in the place of a path.
    """

    def __init__(self, folder: str | os.PathLike[str], *, loggers: Sequence[Logger] = ()) -> None:
        job = current.outside_step("Metrics()")
        require_local(folder=folder)
        self._session = job.session
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        lines = JsonLines(path / f"rank-{self._session.rank}.jsonl")
        self._loggers: list[Logger] = [lines, *(loggers if self._session.rank == 0 else ())]
        self._lines: list[dict[str, float]] = []
        self._closed = False
        _lamina.take_totals(self._session)
        self._since = time.perf_counter()

    def step(self, *, samples: int | None = None, tokens: int | None = None, **values: float) -> dict[str, float]:
        """Writes the line of the steps since the last one.

        Args:
            samples: in the batches of this rank's pipeline.
            tokens: the same.
            **values: what else is to be in it, by name.

        Returns:
            The line.

        Errors:
            UsageError: it was closed.
        """
        if self._closed:
            raise UsageError("step() of Metrics that were closed")
        now = time.perf_counter()
        time_s, self._since = now - self._since, now
        totals = _lamina.take_totals(self._session)
        compute_s, step_s = totals.pop("compute_s"), totals["step_s"]
        line = {"time_s": time_s, "bubble": 1 - compute_s / step_s if step_s else 0.0, **totals}
        for name, count in (("samples_per_s", samples), ("tokens_per_s", tokens)):
            if count is not None:
                line[name] = count / time_s
        line |= values
        for logger in self._loggers:
            logger.log(len(self._lines), line)
        self._lines.append(line)
        return line

    def close(self) -> str:
        """Closes the loggers. Collective over the world: on world rank 0 prints, and returns, a summary of all ranks
        without their first line, which is slow; "" elsewhere. Does nothing the second time.
        """
        if self._closed:
            return ""
        self._abandon()
        ranks = self._session.all_gather("world", _means(self._lines[1:] or self._lines))
        if self._session.rank != 0:
            return ""
        text = _summary(ranks, replicas=self._session.group_size("replicas"))
        print(text, flush=True)
        return text

    def _abandon(self) -> None:
        self._closed = True
        for logger in self._loggers:
            logger.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # the other ranks may not come
            self._abandon()


def _means(lines: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The sums that a rank's summary is made of."""
    if not lines:
        return {"steps": 0}
    time_s = sum(line["time_s"] for line in lines)
    means: dict[str, Any] = {"steps": len(lines), "memory_bytes": max(line["memory_bytes"] for line in lines)}
    for name in ("time_s", "step_s", "bubble", "sent_bytes"):
        means[name] = sum(line[name] for line in lines) / len(lines)
    for name in ("samples_per_s", "tokens_per_s"):
        if all(name in line for line in lines):
            means[name] = sum(line[name] * line["time_s"] for line in lines) / time_s
    return means


def _summary(ranks: Sequence[Mapping[str, Any]], replicas: int) -> str:
    first = ranks[0]
    if not first["steps"]:
        return "metrics of no step"
    speeds = [
        f"{first[name] * replicas:,.1f} {unit}/s"
        for name, unit in (("samples_per_s", "samples"), ("tokens_per_s", "tokens"))
        if name in first
    ]
    head = f"metrics of {first['steps']} steps: {1000 * first['time_s']:.1f} ms each"
    rows = [", ".join([head, *speeds]), "rank  in steps  bubble  sent per step  peak memory"]
    for number, rank in enumerate(ranks):
        if not rank["steps"]:
            rows.append(f"{number:4}  no step")
            continue
        rows.append(
            f"{number:4}{1000 * rank['step_s']:7.1f} ms{100 * rank['bubble']:6.1f} %"
            f"{rank['sent_bytes'] / 2**20:11.2f} MiB{rank['memory_bytes'] / 2**20:9.1f} MiB"
        )
    return "\n".join(rows)
