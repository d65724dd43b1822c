# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmarks in turn, or those whose names begin with one of the words given, and prints their tables.

    python benchmarks/run.py [--quick | --full] [--record] [NAME ...]

Writes build/bench/<name>.json (every sample), <name>.log (what the ranks said) and summary.txt; with --record also the
tables of docs/benchmarks.md, for which benchmarks/recorded keeps the figures. Nothing here judges a
speed: the exit code is 1 only when a benchmark did not run to its end. Whatever ends this program, a signal too, ends
all that it has started.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from measure import LAMINA, OUT, Options, add_effort, table
from record import keep, write_page

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE.parent / "build" / "release" / "bin"
WITH_TENSORFLOW = HERE.parent / "build" / "tensorflow" / "venv" / "bin" / "python"
LIMIT_S = 1200
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


@dataclass
class Benchmark:
    """One run of one file: over `ranks` processes, or as it is when that is 0."""

    name: str
    file: str
    ranks: int = 0
    needs: Path | None = None  # is left out without it; an argument of the file
    usual_s: int = 30  # about how long it takes on a quiet machine with 2 cores
    full_s: int | None = None  # with --full, where that is another time
    python: Path = Path(sys.executable)  # is left out where there is none

    def command(self, options: Options) -> list[str]:
        """The command that runs it: `lamina run`, which leaves no process behind, for one that starts its own too."""
        start = [LAMINA, "run", "--grace-period", "5", "-n", str(self.ranks or 1)]
        needed = [str(self.needs)] if self.needs else []
        effort = [f"--{effort}" for effort in ("quick", "full") if getattr(options, effort)]
        return [*start, "-c", str(self.python), str(HERE / self.file), *needed, "--name", self.name, *effort]

    def lacks(self) -> str:
        """Returns why it cannot run, and what would help; else an empty text."""
        if self.needs and not self.needs.exists():
            return f"{self.needs.name} is not built"
        return "" if self.python.exists() else f"{self.python} is not there: run `make tensorflow`"

    def expected_s(self, options: Options) -> int:
        """The time that it is said to take; when quick, less."""
        return options.pick(min(self.usual_s, 15), self.usual_s, self.full_s or self.usual_s)


BENCHMARKS = [
    Benchmark("launch", "launch.py", usual_s=60, full_s=180),
    Benchmark("first_step", "first_step.py", usual_s=60, full_s=150),
    Benchmark("plan", "plan.py", needs=PROGRAMS / "plan_bench"),
    Benchmark("scale", "scale.py", needs=PROGRAMS / "scale_bench"),
    Benchmark("transport", "transport.py", needs=PROGRAMS / "transport_bench"),
    Benchmark("collectives_2", "collectives.py", ranks=2, full_s=60),
    Benchmark("collectives_4", "collectives.py", ranks=4, usual_s=40, full_s=90),
    Benchmark("hosts", "hosts.py", usual_s=150, full_s=300),
    Benchmark("data_parallel", "data_parallel.py", ranks=2, full_s=60),
    Benchmark("trainer_1", "trainer.py", ranks=1),
    Benchmark("trainer_2", "trainer.py", ranks=2),
    Benchmark("sharding", "sharding.py", ranks=2, usual_s=160, full_s=360),
    Benchmark("overlap", "overlap.py", ranks=2, usual_s=60, full_s=140),
    Benchmark("precision_2", "precision.py", ranks=2, usual_s=60, full_s=140),
    Benchmark("precision_4", "precision.py", ranks=4, usual_s=90, full_s=200),
    Benchmark("checkpoints_2", "checkpoints.py", ranks=2, usual_s=200, full_s=600),
    Benchmark("checkpoints_4", "checkpoints.py", ranks=4, usual_s=300, full_s=800),
    Benchmark("keeping", "keeping.py", ranks=4, usual_s=60, full_s=120),
    Benchmark("optim", "optim.py", needs=PROGRAMS / "optim_bench", usual_s=60, full_s=240),
    Benchmark("remote_updates", "remote_updates.py", usual_s=150, full_s=360),
    Benchmark("engine_call", "engine_call.py", needs=PROGRAMS / "call_bench"),
    Benchmark("engine_schedule", "engine_schedule.py", needs=PROGRAMS / "schedule_bench", usual_s=50, full_s=600),
    Benchmark("cpp_schedule", "engine_schedule.py", needs=PROGRAMS / "cpp_schedule_bench", usual_s=50, full_s=600),
    Benchmark("call_overhead", "call_overhead.py", ranks=2),
    Benchmark("local_call", "local_call.py", usual_s=10),
    Benchmark("pipeline_schedule_2", "pipeline_schedule.py", ranks=2, usual_s=40, full_s=150),
    Benchmark("pipeline_schedule_4", "pipeline_schedule.py", ranks=4, usual_s=80, full_s=300),
    Benchmark("pipeline_schedule_8", "pipeline_schedule.py", ranks=8, usual_s=150, full_s=200),
    Benchmark("slices", "slices.py", ranks=2, usual_s=120, full_s=300),
    Benchmark("slices_plan", "slices_plan.py", ranks=4, usual_s=30, full_s=30),
    Benchmark("team_turns", "team_turns.py", ranks=4, usual_s=50, full_s=120),
    Benchmark("train_gpt_step", "train_gpt_step.py", ranks=2),
    Benchmark("timeline_cost", "timeline_cost.py", ranks=2, usual_s=40),
    Benchmark("elastic", "elastic.py", usual_s=120, full_s=280),
    Benchmark("elastic_kills", "elastic_kills.py", usual_s=700, full_s=1200),
    Benchmark(
        "tensorflow_graphs",
        "tensorflow_graphs.py",
        needs=PROGRAMS / "simulation_bench",
        python=WITH_TENSORFLOW,
        usual_s=120,
        full_s=300,
    ),
    Benchmark("script_state", "script_state.py", ranks=2, usual_s=90),
    Benchmark("verify_1", "recorded_steps.py", usual_s=60),
    Benchmark("verify_2", "recorded_steps.py", ranks=2, usual_s=90),
    Benchmark("train_gpt_pipeline", "train_gpt_pipeline.py", ranks=2),
    Benchmark("plan_prediction", "plan_prediction.py", ranks=2, usual_s=20),
    Benchmark("plan_prediction_order", "plan_prediction_order.py", ranks=2, usual_s=100, full_s=900),
]


def end_with(parent: int) -> None:
    """In a new process: it is killed when its parent dies, and the launcher that it becomes ends all of its own."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def run(benchmark: Benchmark, options: Options) -> str:
    """Runs it; -> what went wrong, empty when nothing did. Its table is printed by the benchmark itself."""
    log_path = OUT / f"{benchmark.name}.log"
    (OUT / f"{benchmark.name}.json").unlink(missing_ok=True)
    own = os.getpid()
    with log_path.open("w") as log:
        process = subprocess.Popen(
            benchmark.command(options), stderr=log, start_new_session=True, preexec_fn=lambda: end_with(own)
        )
        try:
            code = process.wait(LIMIT_S)
        except BaseException as error:
            process.terminate()
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
    parser.add_argument("--record", action="store_true", help="write the tables of docs/benchmarks.md")
    add_effort(parser)
    options = parser.parse_args(namespace=Options())
    chosen = [each for each in BENCHMARKS if not options.names or each.name.startswith(tuple(options.names))]
    if not chosen:
        parser.error(f"no benchmark begins with {' or '.join(options.names)}")
    for ends in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, lambda number, _: sys.exit(128 + number))
    OUT.mkdir(parents=True, exist_ok=True)
    done, failures = [], 0
    left_s = sum(benchmark.expected_s(options) for benchmark in chosen)
    for number, benchmark in enumerate(chosen, 1):
        expected_s = benchmark.expected_s(options)
        about = f"about {expected_s} s, then {(left_s := left_s - expected_s) / 60:.0f} min"
        print(f"{benchmark.name} ({number} of {len(chosen)}): {about}", file=sys.stderr, flush=True)
        if lacks := benchmark.lacks():
            done.append(f"{benchmark.name}: left out, {lacks}\n")
            print(done[-1], flush=True)
            continue
        begin = time.monotonic()
        problem = run(benchmark, options)
        failures += bool(problem)
        if problem:
            done.append(f"{benchmark.name}: FAILED: {problem}\n")
            print(done[-1], flush=True)
        else:
            done.append(table(json.loads((OUT / f"{benchmark.name}.json").read_text())))
            print(f"  ({benchmark.name}: {time.monotonic() - begin:.0f} s)\n", flush=True)
            if options.record:
                keep(benchmark.name, options.pick("--quick", "", "--full"))
    (OUT / "summary.txt").write_text("\n".join(done))
    if options.record:
        write_page(each.name for each in BENCHMARKS)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
