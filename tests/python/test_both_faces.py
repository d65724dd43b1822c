# SPDX-License-Identifier: Apache-2.0
"""One model through the trees of both faces: what they make of it for a plan is the same, and so is the plan.

The C++ one is in tests/frontend/rows.cc.
"""

import json
import subprocess

import pytest
import torch
from launch.launcher_harness import built, command
from torch import nn

from lamina.modules.tree import ModuleTree
from lamina.tracing.trace import Call, TraceOptions, trace

WIDTH = 8
COMPARED = ("name", "parent", "parameter_bytes", "parameter_ids", "output_bytes", "together")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.embedding = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.tail = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, words):
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(self.norm(self.tail(x)), self.embedding.weight)


@pytest.fixture(scope="module")
def theirs():
    """The rows of the C++ face."""
    program = built("bin/frontend_rows")
    printed = subprocess.run([program], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(printed.stdout)


def ours(traced):
    """The rows of the Python face, without the list of modules, which is no child of the C++ one's."""
    tree = ModuleTree(Twin())
    call = Call((torch.zeros(2, 3, dtype=torch.long),), {})
    rows, _ = tree.filled().rows(trace(tree, call, TraceOptions()).measures if traced else None)
    place, kept = {-1: -1}, []
    for number, row in enumerate(rows):
        if row["callable"]:
            place[number] = len(kept)
            kept.append(row)
        else:
            place[number] = place[row["parent"]]
    return [
        {
            "output_bytes": 0,
            **row,
            "parent": place[row["parent"]],
            "together": sorted(place[other] for other in row.get("together", ())),
        }
        for row in kept
    ]


def compared(rows):
    # The number of a parameter is anyone's: they are told apart by the node that has them first.
    numbers = {}
    for row in rows:
        for number in row["parameter_ids"]:
            numbers.setdefault(number, len(numbers))
    return [
        {key: row[key] for key in COMPARED} | {"parameter_ids": [numbers[each] for each in row["parameter_ids"]]}
        for row in rows
    ]


def plan(rows, folder):
    """The plan for three partitions."""
    nodes = [
        {
            "id": number,
            **row,
            "parent": None if row["parent"] < 0 else row["parent"],
            "forward_us": 1,
            "backward_us": 2,
            "activation_bytes": 0,
        }
        for number, row in enumerate(compared(rows))
    ]
    file = folder / "rows.json"
    file.write_text(
        json.dumps(
            {"partitions": 3, "microbatches": 4, "schedule": "interleaved", "memory_weight": 0.8, "nodes": nodes}
        )
    )
    printed = subprocess.run(
        [command(), "plan", file, "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(printed.stdout)["partition"]


@pytest.mark.parametrize("traced", [True, False])
def test_a_model_is_the_same_to_both_faces(theirs, traced, tmp_path):
    rows, other = ours(traced), theirs["traced" if traced else "plain"]
    assert compared(rows) == compared(other)
    names = [row["name"] for row in rows]
    assert names[:3] == (["", "embedding", "layers.0"] if traced else ["", "norm", "embedding"])
    assert any(row["together"] for row in rows) == traced  # the root reads the embedding's weight
    found = plan(rows, tmp_path)
    assert found == plan(other, tmp_path) and len(set(found.values())) == 3
