# SPDX-License-Identifier: Apache-2.0
"""Plans of models that Python traces: chains drawn at random, and models that people train."""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch.launcher_harness import command
from soak import some
from torch import nn

from lamina.planning.cli import plan_of

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import plan_models

WIDTH = 16
WITHOUT_PARAMETERS = [nn.ReLU, nn.Tanh, nn.Dropout, nn.Identity, nn.GELU]


def rows_of(build, inputs):
    return plan_of(build, inputs)["nodes"]


def plan(rows, tmp_path, **goal):
    path = tmp_path / "tree.json"
    path.write_text(json.dumps({"microbatches": 1, "schedule": "interleaved", **goal, "nodes": rows}))
    done = subprocess.run([command(), "plan", str(path), "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_order(rows):
    """The rows of modules without children that are called, in the order of the calls."""
    parents = {row["parent"] for row in rows}
    called = [row for row in rows if row["id"] not in parents and row["stretches"]]
    return sorted(called, key=lambda row: row["stretches"][0][0])


def crossings(rows, found):
    """How often the rank changes between modules that are called one after the other."""
    owners = [found["partition"][str(row["id"])] for row in in_order(rows)]
    return sum(one != other for one, other in itertools.pairwise(owners))


def any_chain(draw):
    """Modules called one after the other, of which about so many per cent have parameters, some in containers."""
    with_parameters = draw.choice([0, 10, 33, 50, 80, 100])

    def layer():
        if draw.randrange(100) < with_parameters:
            return draw.choice([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)])
        return draw.choice(WITHOUT_PARAMETERS)()

    def chain(length, depth):
        inner = [chain(draw.randint(1, 4), depth - 1) for _ in range(draw.randint(0, 2))] if depth else []
        parts = [layer() for _ in range(length)] + inner
        draw.shuffle(parts)
        return nn.Sequential(*parts)

    return chain(draw.randint(1, 24), draw.randint(0, 2))


def smallest_heaviest(costs, parts):
    """The heaviest part of the best cut of a chain into so many."""
    best = [sum(costs[:end]) for end in range(len(costs) + 1)]
    for _ in range(parts - 1):
        best = [min(max(best[cut], sum(costs[cut:end])) for cut in range(end + 1)) for end in range(len(costs) + 1)]
    return best[-1]


@pytest.mark.parametrize("seed", some(range(1000), 40))
def test_a_chain_is_cut_once_or_into_a_v_and_evenly_where_memory_alone_counts(seed, tmp_path):
    draw = random.Random(seed)
    model = any_chain(draw)
    rows = rows_of(lambda: model, [f"torch.ones({draw.choice([1, 32])}, {WIDTH})"])
    partitions = draw.randint(2, 5)
    memory = [2 * row["parameter_bytes"] + row["activation_bytes"] for row in in_order(rows)]
    for weight in (0.0, 0.8, 1.0):
        found = plan(rows, tmp_path, partitions=partitions, memory_weight=weight)
        assert crossings(rows, found) <= (1 if weight == 1 else 2) * (partitions - 1)
    parts = [stage["memory_bytes"] for stage in found["stages"]]
    assert max(parts) <= 1.05 * smallest_heaviest(memory, partitions) + 1e-9


class AlexNet(nn.Module):
    """torchvision's, over smaller images: features, and a classifier with most of the parameters."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            *(nn.Dropout(), nn.Linear(256 * 36, 4096), nn.ReLU(inplace=True)),
            *(nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 1000)),
        )

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def of_the_benchmarks(name):
    return lambda: getattr(plan_models, name)()[0]


def visits(rows, found):
    """The partitions that a microbatch comes to, one after the other, also for what a module does between calls."""
    way = sorted(
        (stretch[0], found["partition"][str(row["id"])])
        for row in rows
        for stretch in row.get("stretches", ())  # a list of modules has none
        if stretch[4]
    )
    return [partition for partition, _ in itertools.groupby(partition for _, partition in way)]


IMAGES = "torch.ones(4, 3, 32, 32)"
MODELS = {  # model, input, and how often a microbatch may go from one partition to the other
    "mlp": (of_the_benchmarks("mlp"), "torch.ones(16, 512)", 2),
    "vgg": (plan_models.VGG, IMAGES, 2),
    "alexnet": (AlexNet, "torch.ones(4, 3, 64, 64)", 2),
    "resnet": (of_the_benchmarks("resnet"), IMAGES, 2),
    "unet": (plan_models.UNet, IMAGES, 7),
    "moe": (of_the_benchmarks("moe"), "torch.ones(64, 256)", 5),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("weight", [0.0, 0.8])
def test_a_model_that_people_train_is_cut_in_few_places(name, weight, tmp_path):
    build, example, most = MODELS[name]
    rows = rows_of(build, [example])
    way = visits(rows, plan(rows, tmp_path, partitions=2, microbatches=4, memory_weight=weight))
    assert len(way) - 1 <= most, way


@pytest.mark.parametrize("name", ["mlp", "vgg", "alexnet", "unet"])
@pytest.mark.parametrize("weight", [0.0, 0.2, 0.8])
def test_modules_that_are_called_one_after_the_other_are_cut_once_or_into_a_v(name, weight, tmp_path):
    build, example, _ = MODELS[name]
    rows = rows_of(build, [example])
    assert crossings(rows, plan(rows, tmp_path, partitions=2, microbatches=4, memory_weight=weight)) <= 2


@pytest.mark.parametrize("name", ["mlp", "vgg", "alexnet", "resnet", "unet", "moe"])
def test_the_step_of_a_plan_is_at_most_five_per_cent_longer_than_that_of_the_best_cut_by_hand(name, tmp_path):
    build, example, _ = MODELS[name]
    rows = rows_of(build, [example])
    goal = {"partitions": 2, "microbatches": 4, "memory_weight": 0.2}
    goal["link"] = {"latency_us": 60, "bytes_per_us": 2000}
    automatic = plan(rows, tmp_path, **goal)["predicted_step_us"]
    modules = [row["id"] for row in in_order(rows) if not row.get("anywhere")]

    def cut(place):
        first = set(modules[:place])
        return [{**row, "placed_at": int(row["id"] not in first)} if row["id"] in modules else row for row in rows]

    cuts = [plan(cut(place), tmp_path, **goal)["predicted_step_us"] for place in range(1, len(modules))]
    assert automatic <= 1.05 * min(cuts)
