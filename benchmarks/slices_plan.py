# SPDX-License-Identifier: Apache-2.0
"""Bytes that ranks with slices of layers send and keep, beside what is to be expected: two partitions of two ranks.

    lamina run -n 4 benchmarks/slices_plan.py

A GPT of lamina's own layers, with whole activations between them (`speed`) and with parts of positions (`memory`).
Exchanged: what a rank sends in a step for states of slices, as the timeline has it: the half of a whole tensor that the
other rank lacks, and of a sum twice that. `of closed form` is over two sums a layer each way, one of the embedding and
one of the head's gradient; with `memory` the stack also gathers its output, and the gradient of its input. Memory: of
each rank, with one microbatch under way, what parameters, their gradients and what is kept for the backward take at
most. `of plan` is over what the plan says, `of speed` over that of the other job.
"""

import json
import tempfile
from pathlib import Path

import torch
from measure import Report, arguments
from plan_prediction import Kept

import lamina

WIDTH, HEADS, LAYERS, WORDS, SAMPLES, LENGTH, MICROBATCHES = 256, 8, 6, 512, 8, 128, 4
WHOLE = SAMPLES // MICROBATCHES * LENGTH * WIDTH * 4  # bytes of the states of a microbatch
SUMS = {"speed": 4 * LAYERS + 2, "memory": 4 * LAYERS + 3}  # of a microbatch; two gathers are as much as a sum
SENT = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times the part of a whole that others have


def start(optimize: str) -> lamina.DistributedModel:
    lamina.init(
        partitions=2,
        tensor_parallel_degree=2,
        ddp=True,
        prescaled_batch=True,
        microbatches=MICROBATCHES,
        active_microbatches=1,
        optimize=optimize,
    )
    torch.manual_seed(0)
    return lamina.distribute(
        lamina.nn.DistributedTransformerLMHead(
            num_layers=LAYERS,
            num_attention_heads=HEADS,
            attention_head_size=WIDTH // HEADS,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            vocab_size=WORDS,
            num_positions=LENGTH,
            causal_mask_size=LENGTH,
            attention_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
            pre_layernorm=True,
            post_layernorm=False,
        )
    )


@lamina.step
def step(model: lamina.DistributedModel, words: torch.Tensor) -> torch.Tensor:
    loss = model((words, None, None, None, words))[0]
    model.backward(loss)
    return loss


def exchanged(model: lamina.DistributedModel, words: torch.Tensor) -> int:
    """The bytes that a rank of each partition sends in a step, all together, on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        with lamina.timeline(str(path)):
            step(model, words)
        events = json.loads(path.read_text())["traceEvents"] if lamina.rank() == 0 else []
    seen = [each for each in events if each.get("cat") == "collective" and each["args"]["bytes"] == WHOLE]
    return sum(SENT[each["name"].split()[0]] * WHOLE // 2 for each in seen) // 2


def kept_bytes(model: lamina.DistributedModel, words: torch.Tensor) -> int:
    own = sum(t.nbytes for p in model.local_parameters() for t in (p, p.grad) if t is not None)
    kept = Kept(model)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda saved: saved.tensor):
        step(model, words)
    return own + kept.most


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = []
    known: list[int] = []  # of the job before
    for optimize, sums in SUMS.items():
        model = start(optimize)
        for _ in range(2):
            step(model, words)
        bytes = exchanged(model, words)
        most = max(kept_bytes(model, words) for _ in range(options.pick(1, 3, 5)))
        rows.append((optimize, "exchanged", bytes, {"of_closed_form": bytes / (MICROBATCHES * sums * WHOLE)}))
        found = lamina.allgather(most, lamina.WORLD)
        for rank, most in enumerate(found):
            stage = model.partition_report()["stages"][rank // lamina.tp_size()]
            ratios = {"of_plan": most / stage["memory_bytes"]} | ({"of_speed": most / known[rank]} if known else {})
            rows.append((optimize, f"memory of rank {rank}", most, ratios))
        known, is_first = found, lamina.rank() == 0
        lamina.shutdown()
    if is_first:
        report = Report(options.name or "slices_plan", "Slices of a GPT over two partitions of two ranks")
        for optimize, figure, bytes, ratios in rows:
            report.add(optimize, figure, "MiB", [bytes / 2**20], **ratios)
        report.finish()


if __name__ == "__main__":
    main()
