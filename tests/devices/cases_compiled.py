# SPDX-License-Identifier: Apache-2.0
"""Code that torch compiles into graphs of a device, of two ranks that are one pipeline."""

import pytest
import torch
from torch import nn

import lamina
from lamina.errors import UsageError

GRAPHS = ("reduce-overhead", "max-autotune")


def begin(device="gpu"):
    lamina.init(partitions=2, microbatches=2, timeout_s=60, device=device)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def wrapped(model, mode):
    model[1] = torch.compile(model[1], mode=mode)


def in_place(model, mode):
    model[1].compile(mode=mode)


def case_a_module_in_a_graph_is_refused_before_the_model_is_taken():
    for mode in GRAPHS:
        for put in (wrapped, in_place):
            model = begin()
            put(model, mode)
            with pytest.raises(UsageError, match="`1` of the model was compiled into graphs of the device") as caught:
                lamina.DistributedModel(model)
            assert caught.value.code == "model-graphs"
            lamina.shutdown()


def case_a_module_that_is_put_into_a_graph_later_is_refused_before_the_step():
    model = lamina.DistributedModel(begin())
    model.module.compile(mode=GRAPHS[0])
    bodies = []

    @lamina.step
    def step(x):
        bodies.append(x)
        return model(x)

    with pytest.raises(UsageError, match="the model was compiled into graphs of the device"):
        step(torch.ones(4, 4, device=lamina.device()))
    assert not bodies


def case_a_function_in_a_graph_is_refused_where_a_step_calls_it():
    model = lamina.DistributedModel(begin())
    runs = []

    def loss_of(y):
        runs.append(y)
        return y.square().mean()

    in_graph = torch.compile(loss_of, mode=GRAPHS[1])

    @lamina.step
    def step(x):
        model.backward(in_graph(model(x)))

    with pytest.raises(UsageError, match="loss_of was compiled into graphs of the device"):
        step(torch.ones(4, 4, device=lamina.device()))
    assert not runs


def case_graphs_of_the_host_and_other_modes_are_taken():
    for device, mode in (("cpu", GRAPHS[0]), ("gpu", "default"), ("gpu", "max-autotune-no-cudagraphs")):
        model = begin(device)
        wrapped(model, mode)
        lamina.DistributedModel(model)
        lamina.shutdown()
