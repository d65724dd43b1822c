# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT on the sources of Python's standard library, in a pipeline of processes.

    lamina run -n 2 examples/train_gpt.py         two processes, the model cut in two by lamina
    python examples/train_gpt.py --partitions 1   one process, the same training

The model (gpt.py) is an ordinary module and the loop an ordinary loop; what belongs to lamina starts with `lamina.`.
A few steps in the middle are recorded: ui.perfetto.dev shows demo/timeline.json, demo/schedule.png is one of them.
Exits with 1 unless the model predicts unseen text better than counts of pairs of bytes do.
"""

import argparse
import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from gpt import GPT
from report import Report
from text import VOCABULARY, Batches, prompts, standard_library, unigram_and_bigram, windows

import lamina

CONTEXT = 128
SEQUENCES = 16
LEARNING_RATE = 3e-3
WARMUP_STEPS = 30
VALIDATION_EVERY = 50
RECORDED_STEPS = 5
ENOUGH_STEPS = 100  # to learn more than which byte follows which
TIMELINE = "timeline.json"


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=at_least_one, default=300, help="training steps")
    parser.add_argument("--partitions", type=int, default=2, help="ranks over which the model is spread")
    parser.add_argument("--microbatches", type=int, default=4, help=f"pieces of a batch of {SEQUENCES} sequences")
    parser.add_argument("--seed", type=int, default=0, help="of the initial values, the batches and the sample")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for what the run shows")
    return parser.parse_args()


def warmup_then_cosine(steps: int):
    return lambda step: min((step + 1) / WARMUP_STEPS, 1) * (1 + math.cos(math.pi * step / steps)) / 2


def live_bytes(model, optimizer: torch.optim.Optimizer) -> list[int]:
    """Returns for each rank the bytes of its parameters, their gradients and their optimizer state."""
    total = 0
    for parameter in model.local_parameters():
        for tensor in (parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()):
            total += tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
    return lamina.allgather(total, lamina.WORLD)


class Steps:
    """The step functions of a model, and what is made of them: all ranks call each."""

    def __init__(self, model: lamina.DistributedModel):
        @lamina.step
        def train(x, y):
            loss = model(x, y)
            model.backward(loss)
            return loss

        @lamina.step
        def validate(x, y):
            return model(x, y)

        @lamina.step
        def predict(x):
            return model(x)[:, -1]

        self.train, self._validate, self._predict = train, validate, predict

    @torch.no_grad()
    def validate(self, unseen: Sequence[torch.Tensor]) -> float:
        losses = [self._validate(text[:, :-1], text[:, 1:]).reduce_mean().item() for text in unseen]
        return sum(losses) / len(losses)

    @torch.no_grad()
    def generate(self, text: torch.Tensor, length: int, seed: int, temperature: float = 0.7) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed)  # on every rank, so that all choose the same bytes
        for _ in range(length):
            logits = self._predict(text[:, -CONTEXT:]).concat().cpu()  # where the numbers are drawn
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)
            text = torch.cat((text, chosen), dim=1)
        return text


def train(
    model: lamina.DistributedModel,
    steps: Steps,
    args: argparse.Namespace,
    batches: Batches,
    unseen: Sequence[torch.Tensor],
    report: Report,
) -> tuple[float, list[int]]:
    """Trains, records a few steps in the middle, and returns the last loss of what is unseen and all live bytes."""
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = lamina.DistributedOptimizer(adamw)
    scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, warmup_then_cosine(args.steps))
    recording = contextlib.ExitStack()
    for step in range(args.steps):
        if step == args.steps // 2:
            recording.enter_context(lamina.timeline(args.out / TIMELINE))
        started = time.perf_counter()
        loss = steps.train(*batches.next()).reduce_mean()
        optimizer.step()
        if step == 0:
            memory = live_bytes(model, adamw)
            report.live_bytes(memory)
        optimizer.zero_grad()
        report.step(loss.item(), lr=float(scheduler.get_last_lr()[0]), time_s=time.perf_counter() - started)
        scheduler.step()
        if step + 1 == min(args.steps // 2 + RECORDED_STEPS, args.steps):
            recording.close()
        if (step + 1) % VALIDATION_EVERY == 0 or step + 1 == args.steps:
            validation_loss = steps.validate(unseen)
            report.validation(validation_loss)
    return validation_loss, memory


def main() -> int:
    args = arguments()
    lamina.init(partitions=args.partitions, microbatches=args.microbatches, schedule="interleaved")

    training, validation = standard_library()
    unigram, bigram = unigram_and_bigram(training, validation)
    batches = Batches(training, sequences=SEQUENCES, context=CONTEXT, seed=args.seed + lamina.dp_rank())
    unseen = windows(validation, count=16 * SEQUENCES, context=CONTEXT).split(SEQUENCES)

    torch.manual_seed(args.seed)
    model = GPT(vocabulary=VOCABULARY, width=160, layers=4, heads=4, context=CONTEXT)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model = lamina.distribute(model)
    steps = Steps(model)

    tokens_per_step = SEQUENCES * CONTEXT * lamina.dp_size()
    report = Report(args.out, steps=args.steps, tokens_per_step=tokens_per_step, enabled=lamina.rank() == 0)
    report.say(f"text: {len(training):,} bytes to learn from, {len(validation):,} unseen; {parameters:,} parameters")
    validation_loss, memory = train(model, steps, args, batches, unseen, report)

    beginnings = prompts(validation, lamina.num_microbatches(), length=32)
    texts = [bytes(text) for text in steps.generate(beginnings, length=160, seed=args.seed).tolist()]
    report.samples([text[:32] for text in texts], [text[32:] for text in texts])
    if lamina.rank() == 0 and lamina.pp_size() > 1:
        command = [Path(sys.executable).with_name("lamina"), "trace", args.out / TIMELINE]
        subprocess.run([*command, "--png", args.out / "schedule.png"], check=True, stdout=subprocess.DEVNULL)
    report.finish(
        unigram=unigram,
        bigram=bigram,
        parameters=parameters,
        world_size=lamina.size(),
        partitions=lamina.pp_size(),
        microbatches=lamina.num_microbatches(),
        live_bytes=memory,
    )
    failed = validation_loss >= bigram and args.steps >= ENOUGH_STEPS
    if validation_loss >= bigram:
        what = "FAILED" if failed else f"{args.steps} steps are few"
        report.say(f"{what}: the model ({validation_loss:.3f}) is no better than the bigram's counts ({bigram:.3f})")
    leads = lamina.rank() == 0
    lamina.shutdown()
    return int(failed and leads)  # not before the rank that says so


if __name__ == "__main__":
    sys.exit(main())
