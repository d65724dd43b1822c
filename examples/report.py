# SPDX-License-Identifier: Apache-2.0
"""Shows a training run: a progress bar, metrics.jsonl and loss.png. Needs rich and matplotlib."""

import json
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text


def _printable(text: bytes) -> str:
    """A text without what would command a terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text.decode(errors="replace")
    )


class Report:
    """Shows and records one run. A report that is not `enabled` does nothing: the other ranks have one."""

    def __init__(self, out: Path, *, steps: int, tokens_per_step: int, enabled: bool):
        self._out, self._steps, self._tokens_per_step, self._enabled = out, steps, tokens_per_step, enabled
        self._console = Console(highlight=False, soft_wrap=True)
        self._losses: list[float] = []
        self._validations: list[tuple[int, float]] = []
        self._progress: Progress | None = None
        self._training_s = 0.0
        if enabled:
            out.mkdir(parents=True, exist_ok=True)
            self._metrics = (out / "metrics.jsonl").open("w", buffering=1)

    def say(self, line: str = "") -> None:
        if self._enabled:
            self._console.print(line, markup=False)

    def step(self, loss: float, *, lr: float, time_s: float) -> None:
        """One training step, which took `time_s`."""
        self._losses.append(loss)
        self._training_s += time_s
        if not self._enabled:
            return
        step, speed = len(self._losses), self._tokens_per_step / time_s
        if step == 3:  # the first ones cut the model and start its optimizer
            self.say(f"the training takes some {time_s * self._steps:.0f} s")
        self._write(step=step, loss=loss, lr=lr, tokens_per_s=round(speed), time_s=round(self._training_s, 3))
        if self._console.is_terminal:
            self._bar().update(
                self._task, completed=step, loss=f"{self._recent_loss():.3f}", speed=f"{self._mean_speed():,.0f}"
            )
        elif step == 1 or step % 25 == 0 or step == self._steps:
            left = self._training_s / step * (self._steps - step)
            told = f"{self._mean_speed():,.0f} tokens/s, {left:.0f} s left"
            self.say(f"step {step}/{self._steps}  loss {self._recent_loss():.3f}  {told}")
        if step == self._steps and self._progress:
            self._progress.stop()

    def validation(self, loss: float) -> None:
        """The loss on validation text after the steps so far."""
        self._validations.append((len(self._losses), loss))
        if self._enabled:
            self._write(step=len(self._losses), validation_loss=loss)

    def live_bytes(self, bytes_per_rank: list[int]) -> None:
        self.say("live tensors: " + ", ".join(f"rank {r} {b / 2**20:.1f} MiB" for r, b in enumerate(bytes_per_rank)))

    def samples(self, prompts: list[bytes], continuations: list[bytes]) -> None:
        """Each prompt, in bold where the terminal can, with what the model wrote after it."""
        for prompt, continuation in zip(prompts, continuations, strict=True):
            text = Text(_printable(prompt), style="bold cyan")
            text.append(_printable(continuation), style="not bold default")
            if self._enabled:
                self._console.rule(style="dim")
                self._console.print(text)

    def finish(self, *, unigram: float, bigram: float, **facts) -> None:
        """The last validation loss beside the counted models, the summary line and the figure."""
        if not self._enabled:
            return
        loss = self._validations[-1][1]
        self._console.rule(style="dim")
        self.say("nats per byte of validation text")
        for name, value in (("unigram", unigram), ("bigram", bigram), ("this model", loss)):
            self.say(f"  {name:<11}{value:.3f}  {value / bigram:.2f} of the bigram's")
        self._write(
            summary=True, steps=len(self._losses), validation_loss=loss, unigram=unigram, bigram=bigram,
            ratio=loss / bigram, tokens_per_s=round(self._mean_speed()), time_s=round(self._training_s, 3), **facts,
        )  # fmt: skip
        self._metrics.close()
        self._draw(unigram, bigram)
        written = ", ".join(sorted(str(path) for path in self._out.iterdir()))
        self.say(f"trained for {self._training_s:.0f} s; see {written}")

    def _bar(self) -> Progress:
        if self._progress is None:  # only now, so that nothing else writes to the terminal below it
            self._progress = Progress(
                TextColumn("training"), BarColumn(bar_width=None), TextColumn("{task.completed}/{task.total}"),
                TextColumn("loss [bold]{task.fields[loss]}"), TextColumn("{task.fields[speed]} tokens/s"),
                TimeRemainingColumn(), console=self._console, expand=True,
            )  # fmt: skip
            self._task = self._progress.add_task("", total=self._steps, loss="", speed="")
            self._progress.start()
        return self._progress

    def _recent_loss(self) -> float:
        recent = self._losses[-10:]
        return sum(recent) / len(recent)

    def _mean_speed(self) -> float:
        return self._tokens_per_step * len(self._losses) / self._training_s

    def _write(self, **values) -> None:
        self._metrics.write(json.dumps(values) + "\n")

    def _draw(self, unigram: float, bigram: float) -> None:
        figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
        axes = figure.subplots()
        steps = range(1, len(self._losses) + 1)
        around = [self._losses[max(0, step - 8) : step + 7] for step in steps]
        smooth = [sum(losses) / len(losses) for losses in around]
        axes.plot(steps, self._losses, color="C0", alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth, color="C0", linewidth=1.8, label="training")
        axes.plot(*zip(*self._validations, strict=True), "o-", color="C3", markersize=4, label="validation")
        for name, value in (("unigram", unigram), ("bigram", bigram)):
            axes.axhline(value, color="0.45", linestyle="--", linewidth=1)
            axes.annotate(f"{name} {value:.2f}", (len(steps), value), (0, 3), textcoords="offset points",
                          ha="right", color="0.35", fontsize=9)  # fmt: skip
        axes.set(xlabel="step", ylabel="nats per byte", title="A GPT on the sources of Python's standard library")
        axes.set_ylim(top=1.25 * unigram, bottom=0.9 * min(*smooth, *(loss for _, loss in self._validations)))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        axes.legend(frameon=False, loc="upper center")
        figure.savefig(self._out / "loss.png")
