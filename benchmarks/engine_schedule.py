# SPDX-License-Identifier: Apache-2.0
"""The schedule on sleeping devices without Python in the ranks (schedule_bench.cc), beside its simulation.

    python benchmarks/engine_schedule.py PATH_TO_schedule_bench

`of ideal` is the median of samples over (m + P - 1) * (tf + tb), each with the operations' times measured alone right
before; `of simulated` the same over the simulated time of the same schedule (lamina/schedule/simulation.h).
"""

import statistics
from pathlib import Path

from measure import Report, arguments, output_of


def samples(program: Path, ranks: int, *case: object) -> list[tuple[float, ...]]:
    """(seconds, ideal, simulated) of each step of a launch."""
    command = [program.with_name("lamina"), "run", "-n", ranks, "-c", program, *case]
    return [tuple(map(float, line.split())) for line in output_of(*command).splitlines()]


def main() -> None:
    options = arguments(__doc__, "program")
    report = Report(options.name or "engine_schedule", "Schedule on sleeping devices, C++: tf 10 ms, tb 20 ms")
    turns, steps = options.pick((1, 2), (1, 8), (5, 4))
    for ranks in (2, 4):
        for m in options.pick((8,), (8,), (4, 8, 16)):
            cases = [(schedule, window) for schedule in ("simple", "interleaved") for window in (0, m)]
            cases.append(("zero_bubble", 0))
            found: dict[tuple[str, int], list] = {case: [] for case in cases}
            for _ in range(turns):
                for case in cases:
                    found[case] += samples(Path(options.program), ranks, m, *case, steps)
            for (schedule, window), values in found.items():
                report.add(
                    f"p={ranks} m={m:<2} {schedule}, active {window or 'default'}",
                    "step",
                    "ms",
                    [1e3 * seconds for seconds, *_ in values],
                    of_ideal=statistics.median(seconds / ideal for seconds, ideal, _ in values),
                    of_simulated=statistics.median(seconds / simulated for seconds, _, simulated in values),
                )
    report.finish()


if __name__ == "__main__":
    main()
