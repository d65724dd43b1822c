# SPDX-License-Identifier: Apache-2.0
"""Messages and bytes that ranks send, and the sockets and endpoints that they have afterwards, in jobs of 2 to 256
ranks. They start, make a step and a clipped one, resume, save, end their program, and agree on another epoch after a
loss; in a job of its own one fails. All are in one process, two ranks to a copy of the model (scale_bench.cc).

    python benchmarks/scale.py PATH_TO_scale_bench

Of each act it shows what the rank sends that sends most. Counted are the words of the engine itself. Tensors that a
backend of collectives reduces or gathers are not, nor the messages of the pipeline between the ranks of one copy, which
no other copy changes. Sockets are those that a job of processes has: to a rank's neighbours, and to the ranks with
which it has exchanged messages so far. Endpoints are those to the ranks beside it, and to those to which it has sent.
What processes have that UCX connects is measured in jobs of 4 to 256 (scale_memory_bench.cc).
"""

import random
import tempfile
from collections import defaultdict
from pathlib import Path

from measure import Report, arguments, output_of


def main() -> None:
    options = arguments(__doc__, "program")
    report = Report(options.name or "scale", "Sent by the rank that sends most, by the number of ranks")
    with tempfile.TemporaryDirectory() as folder:
        lines = output_of(options.program, options.pick(16, 64, 256), folder).splitlines()
    sent: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for act, ranks, *counted in map(str.split, lines):
        sent[act][int(ranks)] = tuple(map(int, counted))
    for act, by_ranks in sent.items():
        for place, (what, unit) in enumerate(
            (("sent", "messages"), ("sent", "bytes"), ("open", "sockets"), ("made", "endpoints"))
        ):
            figures = {f"{ranks}_ranks": each[place] for ranks, each in by_ranks.items()}
            report.add(act.replace("_", " "), what, unit, [figures[max(figures, key=_ranks)]], **figures)
    _add_processes(report, str(Path(options.program).with_name("scale_memory_bench")), options.pick(4, 16, 256))
    report.note("the median is that of the largest job")
    report.note("256 ranks change no epoch here: so many threads of one process do little but look at each other")
    report.finish()


def _add_processes(report: Report, program: str, most: int) -> None:
    had: dict[str, dict[str, tuple[float, ...]]] = defaultdict(dict)
    for size in (4, 16, 64, 256):
        if size > most:
            continue
        for line in output_of(program, size, random.randint(20000, 32000)).splitlines():
            when, ranks, sockets, endpoints, kib = line.split()
            had[when][f"{ranks}_ranks"] = (int(sockets), int(endpoints), int(kib) / 1024)
    for when, by_ranks in had.items():
        for place, (what, unit) in enumerate((("open", "sockets"), ("made", "endpoints"), ("memory", "MiB"))):
            figures = {ranks: each[place] for ranks, each in by_ranks.items()}
            report.add(
                f"processes {when.replace('_', ' ')}", what, unit, [figures[max(figures, key=_ranks)]], **figures
            )


def _ranks(column: str) -> int:
    return int(column.partition("_")[0])


if __name__ == "__main__":
    main()
