# SPDX-License-Identifier: Apache-2.0
"""The default planner beside the published one and beside exhaustive search, and how long it takes (plan_bench.cc).

python benchmarks/plan.py PATH_TO_plan_bench
"""

from collections import defaultdict

from measure import Report, arguments, output_of


def main() -> None:
    options = arguments(__doc__, "program")
    report = Report(options.name or "plan", "Plans of random trees: steps over the default planner's")
    trees = 100 if options.quick else 1000
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    seconds: dict[str, list[float]] = defaultdict(list)
    for word, kind, *values in map(str.split, output_of(options.program, trees).splitlines()):
        if word in ("time", "operations"):
            what = "1,000 modules" if word == "time" else "2,000 operations"
            seconds[f"{what}, p={kind}"].append(float(values[0]))
            continue
        for figure, value in zip(("published", "optimum", "simulated"), map(float, values), strict=True):
            if value > 0:
                ratios[kind, figure].append(value)
    for (kind, figure), values in sorted(ratios.items()):
        report.add(kind, figure, "ratio", values)
    for what, values in seconds.items():
        report.add(what, "to plan", "ms", [1e3 * each for each in values])
    report.note(f'{trees} trees; "optimum" of those small enough to try every plan, "simulated" over predicted')
    report.finish()


if __name__ == "__main__":
    main()
