# SPDX-License-Identifier: Apache-2.0
"""The training of the scripts that meet a fault."""

import importlib
import os
import sys
from pathlib import Path

from torch import nn

import lamina
from lamina.data_parallel.replicas import Replicas

if os.environ.get("LAMINA_DEVICE") == "emulated":
    sys.path.insert(0, str(Path(__file__).parents[2] / "build/emulated"))
    importlib.import_module("emulated")  # makes the devices known to torch


def spread(layers, partitions):
    """The layers one after the other, on the partitions in turn."""
    model = nn.Sequential(*layers)
    for i, layer in enumerate(model):
        lamina.set_partition(layer, i % partitions)
    return lamina.distribute(model)


def train_step(model, begins=lambda: None):
    """Trains on the mean of the squares of what the model returns; each body begins with `begins`."""

    @lamina.step
    def train(x):
        begins()
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return train


def call_before_reductions(act):
    """Has the engine call `act()` whenever it asks for the parameters to average, once the replicas have met; also when
    the model is first watched."""
    own = Replicas._own

    def asked(replicas, names):
        if names == "named_parameters":
            act()
        return own(replicas, names)

    Replicas._own = asked
