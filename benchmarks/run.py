# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmarks in turn, or those whose names begin with one of the words given, and prints their tables.

    python benchmarks/run.py [--quick] [NAME ...]

Writes build/bench/<name>.json (every sample), <name>.log (what the ranks said) and summary.txt. Nothing here judges a
speed: the exit code is 1 only when a benchmark did not run to its end.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from measure import OUT, table

HERE = Path(__file__).resolve().parent
LAMINA = Path(sys.executable).parent / "lamina"
PROGRAMS = HERE.parent / "build" / "release" / "bin"
LIMIT_S = 1200


@dataclass
class Benchmark:
    """One run of one file: over `ranks` processes started by `lamina run`, or as it is when that is 0."""

    name: str
    file: str
    ranks: int = 0
    needs: Path | None = None  # is left out without it; an argument of the file

    def command(self, quick: bool) -> list[str]:
        """What runs it."""
        start = [str(LAMINA), "run", "-n", str(self.ranks)] if self.ranks else [sys.executable]
        needed = [str(self.needs)] if self.needs else []
        return [*start, str(HERE / self.file), *needed, "--name", self.name, *(["--quick"] if quick else [])]


BENCHMARKS = [
    Benchmark("launch", "launch.py"),
    Benchmark("plan", "plan.py", needs=PROGRAMS / "plan_bench"),
    Benchmark("transport", "transport.py", needs=PROGRAMS / "transport_bench"),
    Benchmark("engine_call", "engine_call.py", needs=PROGRAMS / "call_bench"),
    Benchmark("engine_schedule", "engine_schedule.py", needs=PROGRAMS / "schedule_bench"),
    Benchmark("cpp_schedule", "engine_schedule.py", needs=PROGRAMS / "cpp_schedule_bench"),
    Benchmark("call_overhead", "call_overhead.py", ranks=2),
    Benchmark("local_call", "local_call.py"),
    Benchmark("pipeline_schedule_2", "pipeline_schedule.py", ranks=2),
    Benchmark("pipeline_schedule_4", "pipeline_schedule.py", ranks=4),
    Benchmark("train_gpt_step", "train_gpt_step.py", ranks=2),
    Benchmark("timeline_cost", "timeline_cost.py", ranks=2),
    Benchmark("train_gpt_pipeline", "train_gpt_pipeline.py", ranks=2),
    Benchmark("plan_prediction", "plan_prediction.py", ranks=2),
    Benchmark("plan_prediction_order", "plan_prediction_order.py", ranks=2),
]


def run(benchmark: Benchmark, quick: bool) -> str:
    """Runs it; -> what went wrong, empty when nothing did. Its table is printed by the benchmark itself."""
    log_path = OUT / f"{benchmark.name}.log"
    (OUT / f"{benchmark.name}.json").unlink(missing_ok=True)
    with log_path.open("w") as log:
        process = subprocess.Popen(benchmark.command(quick), stderr=log, start_new_session=True)
        try:
            code = process.wait(LIMIT_S)
        except BaseException as error:  # the launcher ends its ranks
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"not done after {LIMIT_S} s"
    if code:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
        return f"exit code {code}; the end of {log_path.name}:\n{tail}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(each.name for each in BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions: does it all work?")
    options = parser.parse_args()
    chosen = [each for each in BENCHMARKS if not options.names or each.name.startswith(tuple(options.names))]
    if not chosen:
        parser.error(f"no benchmark begins with {' or '.join(options.names)}")
    OUT.mkdir(parents=True, exist_ok=True)
    done, failures = [], 0
    for benchmark in chosen:
        if benchmark.needs and not benchmark.needs.exists():
            done.append(f"{benchmark.name}: left out, {benchmark.needs.name} is not built\n")
            print(done[-1], flush=True)
            continue
        begin = time.monotonic()
        problem = run(benchmark, options.quick)
        failures += bool(problem)
        if problem:
            done.append(f"{benchmark.name}: FAILED: {problem}\n")
            print(done[-1], flush=True)
        else:
            done.append(table(json.loads((OUT / f"{benchmark.name}.json").read_text())))
            print(f"  ({benchmark.name}: {time.monotonic() - begin:.0f} s)\n", flush=True)
    (OUT / "summary.txt").write_text("\n".join(done))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
