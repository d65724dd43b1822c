# SPDX-License-Identifier: Apache-2.0
"""Parts that every benchmark shares: figures with their samples, the table that shows them, and the machine they are
from."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

LAMINA = os.environ.get("LAMINA_COMMAND", str(Path(sys.executable).parent / "lamina"))
OUT = Path(__file__).resolve().parents[1] / "build" / "bench"


class Options(argparse.Namespace):
    """The command line of a benchmark: `quick` or `full`, `name`, under which its figures are kept, and its own."""

    def pick(self, quick, usual, full):
        """Returns what was given for as much as is to be measured."""
        return quick if self.quick else full if self.full else usual


def add_effort(parser: argparse.ArgumentParser) -> None:
    """The options of which at most one says how much is to be measured."""
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="fewer cases and repetitions: does it work at all?")
    effort.add_argument("--full", action="store_true", help="more of them: what docs/benchmarks.md records")


def arguments(description: str | None, *positional: str) -> Options:
    """Reads the command line; `positional` is what the benchmark needs itself."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_effort(parser)
    parser.add_argument("--name", help="build/bench/NAME.json is written")
    for name in positional:
        parser.add_argument(name)
    return parser.parse_args(namespace=Options())


def output_of(*command: object) -> str:
    """Returns what a program prints that is no rank of the job that runs the benchmark: the launcher's secret is not
    for it."""
    environment = {name: value for name, value in os.environ.items() if name != "LAMINA_SECRET_FD"}
    words = list(map(str, command))
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=600, env=environment)
    return done.stdout


def machine() -> dict[str, object]:
    """The processor, how many of it, the versions that matter, and how busy all that is right now."""
    import torch

    try:
        cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        cpuinfo = []
    models = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "virtual_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
    }


def each_us(call: Callable[[], object], count: int) -> float:
    """Median microseconds of a call, made `count` times one after the other, after a few that are not counted."""
    samples = []
    for _ in range(count + 5):
        begin = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(samples[5:])


class Report:
    """The figures of one benchmark, in the order in which they were added.

    Args:
        name: under which they are kept. title: a line for the head of the table.
    """

    def __init__(self, name: str, title: str):
        self._content = {"name": name, "title": title, "machine": machine(), "notes": [], "figures": []}

    def note(self, text: str) -> None:
        """A line under the table: what a reader has to know."""
        self._content["notes"].append(text)

    def add(self, case: str, figure: str, unit: str, samples: Iterable[float], **more: float) -> float:
        """One row: what was measured in which case, and every sample. `more` is derived, e.g. a ratio. -> the median"""
        samples = list(samples)
        row = {"case": case, "figure": figure, "unit": unit, "median": statistics.median(samples)}
        row |= {"min": min(samples), "max": max(samples), **more, "samples": samples}
        self._content["figures"].append(row)
        return row["median"]

    def finish(self) -> None:
        """Prints the table and writes build/bench/<name>.json."""
        self._content["machine"]["load_after"] = round(os.getloadavg()[0], 1)
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / f"{self._content['name']}.json").write_text(json.dumps(self._content, indent=1))
        print(table(self._content), flush=True)


def table(content: dict) -> str:
    """A report's content as text; samples, or the smallest and the largest, may be left out."""
    fixed = ("case", "figure", "unit", "median", "min", "max", "n", "samples")
    extra = list(dict.fromkeys(key for row in content["figures"] for key in row if key not in fixed))
    rows = [["case", "figure", "median", "min", "max", "n", *(key.replace("_", " ") for key in extra)]]
    for row in content["figures"]:
        cells = [
            row["case"],
            f"{row['figure']}, {row['unit']}",
            *(_number(row[key]) if key in row else "" for key in ("median", "min", "max")),
        ]
        count = len(row["samples"]) if "samples" in row else row.get("n", "")
        rows.append([*cells, str(count), *(_number(row[key]) if key in row else "" for key in extra)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [content["title"]]
    for row in rows:
        aligned = (
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  " + "  ".join(aligned).rstrip())
    about = content["machine"]
    lines += [f"  {note}" for note in content["notes"]]
    lines.append(
        f"  {about['processor']}, {about['virtual_cores']} virtual cores; torch {about['torch']}, "
        f"Python {about['python']}; load {about['load']} before, {about['load_after']} after"
    )
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
