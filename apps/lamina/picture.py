# SPDX-License-Identifier: Apache-2.0
"""picture.py TIMELINE PICTURE DESCRIPTOR: draws one step of a timeline, what each rank computed and when, above the
plan of it. `lamina trace --png` has this file with it and runs it, with the picture opened. Needs matplotlib."""

import io
import json
import os
import sys
from pathlib import Path


def fail(why: str) -> None:
    if os.fstat(int(sys.argv[3])).st_size == 0:  # it was made for nothing
        os.unlink(PICTURE)
    print(f"lamina trace: {why}", file=sys.stderr)
    sys.exit(2)


TIMELINE, PICTURE = (Path(name).absolute() for name in sys.argv[1:3])
HERE = os.getcwd()
os.chdir("/")  # matplotlib reads a matplotlibrc of the current folder, which may be anybody's
try:
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError as error:
    fail(f"a picture needs matplotlib ({error}): {sys.executable} -m pip install matplotlib")
finally:
    os.chdir(HERE)

FORWARD, BACKWARD = "C0", "C1"
ROWS = {"measured": 0.0, "planned": 0.4}  # below the top of a rank's place
HEIGHT = {"measured": 0.38, "planned": 0.2}
LABELLED = 0.025  # a slice narrower than this share of the step has no number


def _slices(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["ph"] == "X" and "step" in row["args"]]


def _steps(slices: list[dict]) -> dict[int, list[dict]]:
    """The slices of each step that was ended: of those that train a pipeline, else of all."""
    ended = {row["args"]["step"] for row in slices if row["cat"] == "step"}
    turns = [row for row in slices if row["cat"] in ("forward", "backward") and row["args"]["step"] in ended]
    chosen = {row["args"]["step"] for row in turns if row["cat"] == "backward"} or {
        row["args"]["step"] for row in turns
    }
    return {step: [row for row in slices if row["args"]["step"] == step] for step in sorted(chosen)}


def _duration(step: list[dict]) -> float:
    return max(row["dur"] for row in step if row["cat"] == "step")


def _typical(steps: dict[int, list[dict]]) -> int:
    """The step with the median duration, without the first, which warms up."""
    later = list(steps)[1:] or list(steps)
    return sorted(later, key=lambda step: _duration(steps[step]))[len(later) // 2]


def _shade(color: str, microbatch: int, microbatches: int) -> tuple[float, ...]:
    """The microbatches of a step from dark to light."""
    light = 0.6 * microbatch / max(1, microbatches - 1)
    return tuple(part + (1 - part) * light for part in to_rgb(color))


def draw(timeline: Path, form: str) -> bytes:
    """Draws the step with the median duration."""
    steps = _steps(_slices(json.loads(timeline.read_text())["traceEvents"]))
    if not steps:
        raise ValueError(f"{timeline} has no step that was ended, so there is nothing to draw")
    number = _typical(steps)
    rows = steps[number]
    ranks = sorted({row["pid"] for row in rows})
    begin = min(row["ts"] for row in rows if row["cat"] == "step")
    turns = [row for row in rows if row["cat"] in ("forward", "backward", "planned")]
    microbatches = 1 + max(row["args"]["microbatch"] for row in turns)
    figure = Figure(figsize=(11, 1.3 + 0.95 * len(ranks)), dpi=150, layout="constrained")
    axes = figure.subplots()
    for row in turns:
        planned = row["cat"] == "planned"
        what = row["name"] if planned else row["cat"]
        kind = "planned" if planned else "measured"
        microbatch = row["args"]["microbatch"]
        color = _shade(FORWARD if what == "forward" else BACKWARD, microbatch, microbatches)
        left, width = (row["ts"] - begin) / 1000, row["dur"] / 1000
        top = ranks.index(row["pid"]) + ROWS[kind]
        axes.broken_barh([(left, width)], (top, HEIGHT[kind]), facecolors=[color], edgecolor="white", linewidth=0.4)
        if not planned and row["dur"] > LABELLED * _duration(rows):
            dark = microbatch < microbatches / 2
            axes.text(left + width / 2, top + HEIGHT[kind] / 2, microbatch, ha="center", va="center", fontsize=8,
                      color="white" if dark else "black")  # fmt: skip
    axes.set_yticks(
        [rank + ROWS[kind] + HEIGHT[kind] / 2 for rank in range(len(ranks)) for kind in ROWS],
        [f"rank {rank}" if kind == "measured" else kind for rank in ranks for kind in ROWS],
    )
    for label in axes.get_yticklabels()[1::2]:
        label.set(fontsize=8, color="0.45")
    axes.set(xlabel="ms", title=f"Step {number}, of {microbatches} microbatches")
    axes.set_xlim(0, max(row["ts"] + row["dur"] - begin for row in rows) / 1000)
    axes.set_ylim(len(ranks) - 0.25, -0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(handles=[Patch(color=FORWARD, label="forward"), Patch(color=BACKWARD, label="backward")],
                frameon=False, loc="upper right", ncols=2, bbox_to_anchor=(1, 1.02 + 0.16 / len(ranks)))  # fmt: skip
    drawn = io.BytesIO()
    figure.savefig(drawn, format=form)
    return drawn.getvalue()


if __name__ == "__main__":
    try:
        drawn = draw(TIMELINE, PICTURE.suffix[1:])
        with open(int(sys.argv[3]), "wb") as file:
            file.truncate()
            file.write(drawn)
    except (OSError, ValueError) as error:
        fail(str(error))
