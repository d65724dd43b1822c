# SPDX-License-Identifier: Apache-2.0
"""A model as the planner sees it."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lamina.errors import UsageError
from lamina.modules.placement import partition
from lamina.modules.tree import ModuleTree


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.ReLU()])
        self.blocks.append(self.blocks[0])
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.scales = nn.ParameterList([torch.ones(2), torch.ones(2)])
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, x):
        return self.head(self.embedding(x))


def test_each_module_once_parents_first():
    tree = ModuleTree(Tied())
    assert tree.names == ["", "embedding", "blocks", "blocks.0", "blocks.1", "head"]
    assert tree.parents == [-1, 0, 0, 2, 2, 0]


def test_bytes_shared_ids_and_what_is_called():
    rows = {row["name"]: row for row in ModuleTree(Tied()).filled().rows()[0]}
    assert [rows[name]["parameter_bytes"] for name in ("", "embedding", "blocks", "blocks.0", "blocks.1")] == [
        16,
        60,
        0,
        48,
        0,
    ]
    ids = {name: row["parameter_ids"] for name, row in rows.items()}
    assert ids["head"] == ids["embedding"] and len(ids["blocks.0"]) == 2 and len(ids[""]) == 2
    assert [rows[name]["callable"] for name in ("", "blocks", "blocks.1")] == [True, False, True]


def test_every_name_of_a_module_leads_to_its_node():
    paths = dict(ModuleTree(Tied()).filled().paths())
    assert paths["blocks.2"] == paths["blocks.0"] == 3
    assert paths["scales"] == 0


def test_parameters_then_buffers_each_once():
    names = [name for name, _, _ in ModuleTree(Tied()).filled().tensors()]
    assert names == ["embedding.weight", "blocks.0.weight", "blocks.0.bias", "scales.0", "scales.1", "hidden"]


@pytest.mark.parametrize(
    "module",
    [
        nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2, 8),
        parametrizations.weight_norm(nn.Linear(2, 2)),
        parametrizations.orthogonal(nn.Linear(2, 2)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_that_read_their_childrens_parameters_stay_whole(module):
    tree = ModuleTree(nn.Sequential(module))
    assert tree.names == ["", "0"]
    assert sum(row["parameter_bytes"] for row in tree.filled().rows()[0]) == sum(
        p.numel() * 4 for p in module.parameters()
    )
    assert {node for _, _, node in tree.filled().tensors()} == {1}


def test_placements_by_hand():
    with partition(1):
        first = nn.Linear(1, 1)
    rows = ModuleTree(nn.Sequential(first, nn.Linear(1, 1))).filled().rows()[0]
    assert [row["placed_at"] for row in rows] == [None, 1, None]


def test_lazy_modules_are_refused_by_name():
    with pytest.raises(UsageError, match=r"0\.weight has no shape yet"):
        ModuleTree(nn.Sequential(nn.LazyLinear(2)))


def test_descriptions_differ_where_models_do():
    wide, narrow = (ModuleTree(nn.Sequential(nn.Linear(2, width))).filled().description() for width in (3, 4))
    assert wide != narrow and wide == ModuleTree(nn.Sequential(nn.Linear(2, 3))).filled().description()
