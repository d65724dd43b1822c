# SPDX-License-Identifier: Apache-2.0
"""Messages and bytes that ranks send in a start, a step, a clipped step, a resumption and a save, and the sockets that
they have after it, in jobs of 2 to 256 ranks. These are all in one process, two ranks to a copy of the model
(scale_bench.cc).

    python benchmarks/scale.py PATH_TO_scale_bench

Of each act it shows what the rank sends that sends most. Counted are the words of the engine itself. Tensors that a
backend of collectives reduces or gathers are not, nor the messages of the pipeline between the ranks of one copy, which
no other copy changes. Sockets are those that a job of processes has: to a rank's neighbours, and to the ranks with
which it has exchanged messages so far.
"""

import tempfile
from collections import defaultdict

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
        for place, (what, unit) in enumerate((("sent", "messages"), ("sent", "bytes"), ("open", "sockets"))):
            figures = {f"{ranks}_ranks": each[place] for ranks, each in by_ranks.items()}
            report.add(act.replace("_", " "), what, unit, [figures[max(figures, key=_ranks)]], **figures)
    report.note("the median is that of the largest job")
    report.finish()


def _ranks(column: str) -> int:
    return int(column.partition("_")[0])


if __name__ == "__main__":
    main()
