# SPDX-License-Identifier: Apache-2.0
"""Replacements of a job over two ranks in torch, against the table of lamina.torch_patches."""

import sys
from pathlib import Path

import torch
import torch._dynamo  # its compiler is left alone until somebody imports it
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from python.torch_patches.replaced import Torchs

import lamina

torchs = Torchs()
lamina.init(partitions=2, microbatches=2)
assert not torchs.replaced(), torchs.replaced()

model = lamina.distribute(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)))
for index, layer in enumerate(model.module):
    lamina.set_partition(layer, min(index, 1))


@lamina.step
def step(x):
    output = model(x)
    model.backward(output.sum())


step(torch.ones(4, 4))
replaced, told = torchs.replaced(), torchs.rows("While a model is cut")
if lamina.pp_rank() == 1:  # no Sequential has modules that it would call on the other rank
    told = {key: name for key, name in told.items() if name != "torch.nn.Sequential.forward"}
assert replaced.keys() == told.keys(), (
    [name for key, name in replaced.items() if key not in told],
    [name for key, name in told.items() if key not in replaced],
)

lamina.shutdown()
assert list(torchs.replaced().values()) == ["torch._tensor_str._str"], torchs.replaced()
