# SPDX-License-Identifier: Apache-2.0
"""Steps of TensorFlow's models over ranks (tensorflow_ranks.py): stages that sleep, beside the schedule in simulated
time; what a step takes whose stages do nothing; and the first step with 16 microbatches beside that with one.

    build/tensorflow/venv/bin/python benchmarks/tensorflow_graphs.py PATH_TO_simulation_bench

`of simulated` is the median of steps over the simulated one (simulation_bench.cc) with the operations' times, measured
alone right before. `of one` is a first step over that with one microbatch, of the same batch, in the same turn.
"""

import statistics
import sys
from pathlib import Path

from measure import LAMINA, Report, arguments, output_of

RANKS = Path(__file__).with_name("tensorflow_ranks.py")


def seconds(ranks: int, *case: object) -> list[float]:
    """Runs a job. Returns what its rank 0 prints."""
    said = output_of(LAMINA, "run", "-n", ranks, "-c", sys.executable, RANKS, *case)
    return list(map(float, said.splitlines()[-1].split()))


def add_sleeping(report: Report, simulation: str, ranks: int, microbatches: int, schedule: str, steps: int) -> None:
    forward, backward, *found = seconds(ranks, "sleeping", schedule, microbatches, steps)
    simulated = float(output_of(simulation, ranks, microbatches, schedule, 0, forward, backward))
    report.add(
        f"p={ranks} m={microbatches:<2} {schedule}, sleeping",
        "step",
        "ms",
        [1e3 * each for each in found],
        of_simulated=statistics.median(found) / simulated,
    )


def add_first_steps(report: Report, turns: int) -> None:
    found: dict[int, list[float]] = {1: [], 16: []}
    for _ in range(turns):
        for microbatches, values in found.items():
            values.append(seconds(2, "first", "interleaved", microbatches, 0)[0])
    for microbatches, values in found.items():
        ratio = statistics.median(mine / one for mine, one in zip(values, found[1], strict=True))
        report.add(f"p=2 m={microbatches:<2} a Transformer", "first step", "s", values, of_one=ratio)


def main() -> None:
    options = arguments(__doc__, "program")
    report = Report(options.name or "tensorflow_graphs", "TensorFlow over ranks: tf 10 ms, tb 20 ms where they sleep")
    steps = options.pick(2, 8, 16)
    for ranks in options.pick((2,), (2, 4), (2, 3, 4)):
        for microbatches in options.pick((8,), (8,), (8, 16)):
            for schedule in ("simple", "interleaved"):
                add_sleeping(report, options.program, ranks, microbatches, schedule, steps)
    empty = seconds(2, "empty", "interleaved", 16, options.pick(20, 100, 300))
    report.add("p=2 m=16 interleaved, empty", "step", "ms", [1e3 * each for each in empty])
    add_first_steps(report, options.pick(1, 3, 5))
    report.finish()


if __name__ == "__main__":
    main()
