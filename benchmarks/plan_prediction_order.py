# SPDX-License-Identifier: Apache-2.0
"""Ten plans of a model over two sleeping devices, the automatic one and nine by hand, from one cut to torn ones: their
predicted steps beside the measured ones.

Modules with parameters sleep for what a trace counts of them, a microbatch for 60 ms in all, and the model is cut with
measured times. So a step shows the plan, the messages and lamina's own work, whatever the cores can do at once.

    lamina run -n 2 benchmarks/plan_prediction_order.py

Times are measured once for each model, and all plans are predicted from them, so that these differ by the plan alone.
`pairs in order` is the part of pairs of plans that are predicted in the order of their measured steps, where these
are 5 per cent apart or more. `order` is the rank correlation of predicted and measured steps (Spearman's);
`crossings` how often the automatic plan goes from one rank to the other between modules in the order of the model. In
each round every plan is run once. The first half of the rounds finds the best plan by hand, and the best cut by hand
in one place. The other half compares the automatic plan with them: `of best` is the median of the ratios of their
steps.
"""

import copy
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from unittest.mock import patch

import plan_models
import torch
from measure import Report, arguments
from sleeping import slow_down
from torch import nn

import lamina
import lamina.tracing.trace as tracing
from lamina.modules.tree import ModuleTree
from lamina.tracing.sandbox import Call
from lamina.tracing.trace import TraceOptions, trace

MICROBATCHES = 4
MICROBATCH_MS = 60
CUTS = 5  # the first of the plans by hand
APART = 1.05  # measured steps of pairs that count
CASES = ("mlp", "vgg", "resnet", "gpt", "unet", "moe")

Plan = tuple[int, ...] | None  # per leaf its partition; None: the automatic one


def leaves(model: nn.Module) -> list[nn.Module]:
    """The modules that hold no others, in the order of the model, each once."""
    return [module for module in model.modules() if not list(module.children())]


def plans(parts: list[nn.Module]) -> list[Plan]:
    """The automatic one; cuts in one place; stripes; and one that is torn at random. Modules that share a parameter are
    where the first of them is."""
    count = len(parts)
    cuts = [tuple(int(i >= count * part // 8) for i in range(count)) for part in range(2, 2 + CUTS)]
    stripes = [tuple(i // width % 2 for i in range(count)) for width in (max(count // 4, 2), 2, 1)]
    draw = random.Random(1)
    by_hand = [*cuts, *stripes, tuple(draw.randrange(2) for _ in range(count))]
    holders: dict[nn.Parameter, int] = {}
    first = [min((holders.setdefault(p, i) for p in part.parameters()), default=i) for i, part in enumerate(parts)]
    return [None, *(tuple(plan[each] for each in first) for plan in by_hand)]


def crossings(owners: Iterable[int]) -> int:
    """How often the rank changes."""
    return sum(one != other for one, other in itertools.pairwise(owners))


def sleeping(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], plan_models.Loss]:
    """A model on a sleeping device, a small batch for it, and its loss."""
    torch.manual_seed(0)
    model, (x, y), loss_of = getattr(plan_models, name)()
    x, y = x[: 2 * MICROBATCHES], y[: 2 * MICROBATCHES]
    tree = ModuleTree(model)
    found = trace(tree, Call((*((x, y) if name == "gpt" else (x,)),), {}), TraceOptions())
    slow = [i for i, part in enumerate(tree.modules) if part in set(leaves(model)) and list(part.parameters())]
    whole_us = sum(found.measures[i].forward_us + found.measures[i].backward_us for i in slow)
    for i in slow:
        each, second_us = found.measures[i], 1e3 * whole_us / MICROBATCH_MS
        slow_down(tree.modules[i], each.forward_us / second_us, each.backward_us / second_us)
    return model, (x, y), loss_of


def times_once() -> Callable[..., None]:
    """Measures times as a trace does; but for the first time it gives those of the first."""
    measure, found = tracing.measure_times, []

    def measured(tree, call, device, measures):
        if not found:
            measure(tree, call, device, measures)
            found.extend(copy.deepcopy(measures))
        measures[:] = copy.deepcopy(found)

    return measured


def run(name: str, plan: Plan, steps: int) -> tuple[float, float, int]:
    """The median step of a plan, the predicted one, in milliseconds, and its crossings; collective."""
    model, (x, y), loss_of = sleeping(name)
    lamina.init(partitions=2, microbatches=MICROBATCHES, ddp=False)
    parts = leaves(model)
    for module, partition in zip(parts, plan or (), strict=False):
        lamina.set_partition(module, partition)
    names = {module: path for path, module in model.named_modules()}
    distributed = lamina.distribute(model, trace_execution_times=True)

    @lamina.step
    def step(x, y):
        loss = loss_of(distributed, x, y)
        distributed.backward(loss)
        return loss

    took_ms = []
    for _ in range(2 + steps):
        lamina.barrier()
        began = time.perf_counter()
        step(x, y)
        took_ms.append(1e3 * (time.perf_counter() - began))
    found = distributed.partition_report()
    owners = [found["partition"][names[module]] for module in parts if names[module] in found["partition"]]
    lamina.shutdown()
    return statistics.median(took_ms[2:]), found["predicted_step_us"] / 1e3, crossings(owners)


def pairs_in_order(predicted: Sequence[float], took: Sequence[float]) -> float:
    """The part of the pairs with measured steps that are clearly apart; 1 where there are none."""
    pairs = [(i, j) for i in range(len(took)) for j in range(len(took)) if took[i] >= APART * took[j]]
    return sum(predicted[i] > predicted[j] for i, j in pairs) / len(pairs) if pairs else 1.0


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's."""
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + ordered.count(value) / 2 for value in values]


def compare(report: Report, name: str, rounds: int, steps: int) -> None:
    """Adds the figures of one model; collective."""
    model = getattr(plan_models, name)()[0]
    tried = plans(leaves(model))
    with patch.object(tracing, "measure_times", times_once()):
        measured = [[run(name, plan, steps) for plan in tried] for _ in range(rounds)]
    took = [statistics.median(each[i][0] for each in measured) for i in range(len(tried))]
    predicted = [measured[0][i][1] for i in range(len(tried))]
    half = (rounds + 1) // 2
    choice = [statistics.median(each[i][0] for each in measured[:half]) for i in range(len(tried))]
    automatic = [each[0][0] for each in measured]
    report.add(name, "step, automatic", "ms", automatic, predicted_ms=predicted[0], crossings=measured[0][0][2])
    for figure, plans_by_hand in (("best cut", range(1, CUTS + 1)), ("best plan", range(1, len(tried)))):
        best = min(plans_by_hand, key=lambda i: choice[i])
        report.add(name, f"step, {figure} by hand", "ms", [each[best][0] for each in measured],
                   predicted_ms=predicted[best], crossings=measured[0][best][2])  # fmt: skip
        ratios = [each[0][0] / each[best][0] for each in measured[half:] or measured]
        report.add(name, f"automatic, of {figure}", "ratio", ratios)
    report.add(name, "pairs in order", "part", [pairs_in_order(predicted, took)])
    report.add(name, "order", "correlation", [correlation(predicted, took)])


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    report = Report(options.name or "plan_prediction_order", "Plans of two partitions: predicted and measured steps")
    for name in options.pick(CASES[:1], CASES[:2], CASES):
        compare(report, name, rounds=options.pick(1, 2, 6), steps=options.pick(2, 3, 5))
    lamina.init(partitions=2, microbatches=MICROBATCHES)
    if lamina.rank() == 0:
        report.finish()
    lamina.shutdown()


if __name__ == "__main__":
    main()
