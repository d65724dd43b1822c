# SPDX-License-Identifier: Apache-2.0
"""Promises of the plan of the demo's model (examples/gpt.py), beside what its ranks then need.

    lamina run -n 2 benchmarks/plan_prediction.py

The model is cut with measured times (trace_execution_times). Time: of each stage and microbatch, forward and backward;
measured as the processor time of the rank's process in a step, so that waiting does not count. Memory: of each rank,
what its parameters, their gradients and what is kept for the backward take at most at one moment of a step. `of
measured` is the plan's figure over the measured one: the median time, the most memory of all the steps.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from measure import Report, arguments

import lamina

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

SEQUENCES, CONTEXT, MICROBATCHES, VOCABULARY = 16, 128, 4, 256


class Kept:
    """The bytes that all threads of this process keep for backwards, once per memory, without the model's own."""

    def __init__(self, model: torch.nn.Module):
        self.most = self.now = 0
        self._own = {tensor.untyped_storage()._cdata for tensor in (*model.local_parameters(), *model.local_buffers())}
        self._users: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> "_Saved":
        return _Saved(self, tensor)

    def add(self, storage: torch.UntypedStorage, change: int) -> None:
        key = storage._cdata
        if key in self._own:
            return
        before = self._users.get(key, 0)
        self._users[key] = before + change
        if before == 0 or self._users[key] == 0:
            self.now += change * storage.nbytes()
            self.most = max(self.most, self.now)


class _Saved:
    def __init__(self, kept: Kept, tensor: torch.Tensor):
        self.tensor, self._kept, self._storage = tensor, kept, tensor.untyped_storage()
        kept.add(self._storage, +1)

    def __del__(self):
        self._kept.add(self._storage, -1)


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    lamina.init(partitions=2, microbatches=MICROBATCHES, schedule="interleaved")
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, width=160, layers=4, heads=4, context=CONTEXT)
    model = lamina.distribute(model, trace_execution_times=True)

    @lamina.step
    def step(x, y):
        loss = model(x, y)
        model.backward(loss)
        return loss

    x, y = torch.randint(VOCABULARY, (2, SEQUENCES, CONTEXT), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        step(x, y)
    times_us = []
    for _ in range(3 if options.quick else 15):
        lamina.barrier()
        begin = time.process_time()
        step(x, y)
        times_us.append(1e6 * (time.process_time() - begin) / MICROBATCHES)
    own = sum(t.nbytes for p in model.local_parameters() for t in (p, p.grad) if t is not None)
    most_bytes = []
    for _ in times_us:
        kept = Kept(model)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda saved: saved.tensor):
            step(x, y)
        most_bytes.append(own + kept.most)
    found = lamina.allgather((times_us, most_bytes), lamina.WORLD)

    if lamina.rank() == 0:
        report = Report(options.name or "plan_prediction", "The plan of the demo's GPT, and what its ranks need")
        for stage, (times, most_bytes) in zip(model.partition_report()["stages"], found, strict=True):
            case = f"stage {stage['partition']}"
            report.add(case, "time, measured", "ms", [each / 1e3 for each in times])
            planned = stage["time_us"]
            report.add(case, "time, planned", "ms", [planned / 1e3], of_measured=planned / statistics.median(times))
            report.add(case, "memory, measured", "MiB", [each / 2**20 for each in most_bytes])
            planned = stage["memory_bytes"]
            report.add(case, "memory, planned", "MiB", [planned / 2**20], of_measured=planned / max(most_bytes))
        report.finish()
    lamina.shutdown()


if __name__ == "__main__":
    main()
