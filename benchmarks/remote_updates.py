# SPDX-License-Identifier: Apache-2.0
"""Updates of parameters that another rank owns, beside torch's DistributedOptimizer over RPC, in turns.

Each turn is a job of its own, see remote_trainers.py: the threads of torch's RPC look out for messages at all times,
and would take the processors from lamina's turns. `cost` is the time that a disturbance adds to the quiet case, by the
medians, `cost of GIL` what a thread that spins adds to a process that does. A thread that holds the GIL and computes
nothing takes no processor: what it adds is what an update waits for the GIL.
"""

import json
from pathlib import Path
from statistics import median

from measure import LAMINA, Report, arguments, output_of

JOB = Path(__file__).with_name("remote_trainers.py")


def main() -> None:
    options = arguments(__doc__)
    rounds = options.pick(3, 10, 20)
    report = Report(options.name or "remote_updates", "Updates of 1,000 parameters on another rank, by 4 trainers")
    samples: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(options.pick(1, 5, 11)):
        for engine in ("lamina", "torch"):
            said = output_of(LAMINA, "run", "--preload", "torch,lamina", "-n", 5, JOB, engine, rounds)
            for name, cases in json.loads(said).items():
                for case, updates in cases.items():
                    samples.setdefault((name, case, engine), []).append(updates)
    medians = {key: median(each) for key, each in samples.items()}
    for (name, case, engine), each in samples.items():
        more = {}
        if engine == "lamina":
            more["of_torch"] = medians[name, case, engine] / medians[name, case, "torch"]
        if case != "quiet":
            more["cost"] = medians[name, "quiet", engine] / medians[name, case, engine] - 1
        if case == "spinning":
            more["cost_of_GIL"] = medians[name, "busy", engine] / medians[name, case, engine] - 1
        report.add(f"{name}, {case}", engine, "updates/s", each, **more)
    report.finish()


if __name__ == "__main__":
    main()
