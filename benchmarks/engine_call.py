# SPDX-License-Identifier: Apache-2.0
"""A remote call without Python in the ranks (call_bench.cc), in turns with the same bytes there and back over lamina's
transport alone (transport_bench.cc).

    python benchmarks/engine_call.py PATH_TO_call_bench

`of transport` is the median, over the turns, of a call's time over that of the messages alone.
"""

import random
import statistics
from pathlib import Path

from measure import Report, arguments, output_of

SIZES = {4096: "4 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB"}
FIGURES = ("call, seen", "call, never seen", "the work itself")


def measured(*command: object) -> dict[int, list[float]]:
    """Seconds by size, as the programs print them."""
    lines = output_of(*command).splitlines()
    return {int(size): list(map(float, seconds)) for size, *seconds in map(str.split, lines)}


def main() -> None:
    options = arguments(__doc__, "program")
    program = Path(options.program)
    report = Report(options.name or "engine_call", "A remote call, C++, until its value is read")
    turns = []
    for _ in range(2 if options.quick else 9):
        calls = measured(program.with_name("lamina"), "run", "-n", 2, "-c", program, *SIZES)
        turns.append((calls, measured(program.with_name("transport_bench"), random.randint(20000, 32000), *SIZES)))
    for size, label in SIZES.items():
        floor = [transport[size][0] for _, transport in turns]
        report.add(label, "messages alone, there and back", "us", [1e6 * seconds for seconds in floor])
        for index, figure in enumerate(FIGURES):
            seconds = [calls[size][index] for calls, _ in turns]
            ratio = statistics.median(mine / theirs for mine, theirs in zip(seconds, floor, strict=True))
            report.add(label, figure, "us", [1e6 * value for value in seconds], of_transport=ratio)
    report.finish()


if __name__ == "__main__":
    main()
