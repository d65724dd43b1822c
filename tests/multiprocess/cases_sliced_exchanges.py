# SPDX-License-Identifier: Apache-2.0
"""Exchanges of two ranks over which layers are cut, and the time that a trace says that they take."""

import collections
import json
import tempfile
from pathlib import Path

import pytest
import torch
from multiprocess.cases_sliced import PLAN, RANK, Block
from torch import nn

import lamina
from lamina.modules.tree import ModuleTree
from lamina.planning.cli import plan_of
from lamina.planning.first_rank import FirstRank
from lamina.tracing.costs import CPU
from lamina.tracing.sandbox import Call
from lamina.tracing.trace import TraceOptions, trace

LAYERS, WIDTH = 3, 16


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, given):
        return self.blocks(given[0])


def stack():
    return lamina.nn.DistributedTransformer(
        LAYERS,
        num_attention_heads=4,
        attention_head_size=4,
        hidden_size=WIDTH,
        intermediate_size=24,
        pre_layernorm=True,
    )


def start(make, **keys):
    """A job with such a model, and states that it is given."""
    lamina.init({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "timeout_s": 60} | keys)
    torch.manual_seed(0)
    model = make()
    if make is Blocks:
        lamina.set_tensor_parallelism(model, plan=PLAN)
    return lamina.distribute(model), torch.randn(2, 5, WIDTH, requires_grad=True)


def counted(make, **keys):
    """How often each operation made a tensor of so many bytes, forward and backward."""
    model, states = start(make, **keys)
    model((states, None))  # the first call compares what ranks are given
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        with lamina.timeline(str(path)):
            output = model((states, None))
            (output if isinstance(output, torch.Tensor) else output[0]).sum().backward()
        events = json.loads(path.read_text())["traceEvents"] if RANK == 0 else []
    lamina.shutdown()
    own = (each for each in events if each.get("cat") == "collective" and each["pid"] == 0)
    return collections.Counter((each["name"].split()[0], each["args"]["bytes"]) for each in own)


def case_layers_make_two_sums_each_way_or_as_many_gathers_and_scattered_sums():
    whole, row = 2 * 5 * WIDTH * 4, WIDTH * 4
    for make in (Blocks, stack):
        found = counted(make, optimize="speed")
        assert RANK or found == {("all_reduce", whole): 4 * LAYERS}, found
    found = counted(stack, optimize="memory")
    # The stack puts its output together, and the gradient of its input. Norms and biases have gradients in parts.
    each = 4 * LAYERS
    others = {key: number for key, number in found.items() if key[1] != row}
    # Five positions lie in parts of three, which travel with one that is empty.
    sent = 2 * 6 * WIDTH * 4
    assert RANK or others == {("all_gather", sent): each + 2, ("reduce_scatter", sent): each}, found


def case_a_trace_counts_the_time_of_exchanges():
    half = 2 * 5 * WIDTH * 4 / 2
    for own, batches in ((False, 1), (True, 2)):
        model, states = start(Blocks, prescaled_batch=not own)
        tree = ModuleTree(model.module)
        found = trace(tree, Call(((states, None),), {}), TraceOptions())
        assert found.measures is not None, found.notes
        sum_us = batches * CPU.exchange_us(2 * half)
        counted = {name: each.exchange_us for name, each in zip(tree.names, found.measures, strict=True)}
        for name, expected in {
            "blocks.1.attention.query": (0, sum_us),
            "blocks.1.attention.key": (0, 0),
            "blocks.1.attention.out": (sum_us, 0),
            "blocks.1.up": (0, sum_us),
            "blocks.1.down": (sum_us, 0),
        }.items():
            assert counted[name] == expected, (name, counted[name], expected)
        assert sum(map(sum, counted.values())) == pytest.approx(4 * LAYERS * sum_us)
        lamina.shutdown()


def marked():
    model = Blocks()
    lamina.set_tensor_parallelism(model, plan=PLAN)
    return model


def case_lamina_plan_counts_as_a_job_does():
    given = f"(torch.randn(2, 5, {WIDTH}, requires_grad=True), None)"
    for own, make, build in ((False, Blocks, marked), (True, Blocks, marked), (False, stack, stack)):
        model, states = start(make, prescaled_batch=not own)
        tree = ModuleTree(model.module)
        found = trace(tree, Call(((states, None),), {}), TraceOptions())
        rows = tree.filled().rows(found.measures)[0]
        lamina.shutdown()
        planned = plan_of(build, [given], rank=FirstRank(2, one_batch=not own))
        assert planned["slices"]["layers"]
        for mine, theirs in zip(planned["nodes"], rows, strict=True):
            for key in ("name", "parameter_bytes", "forward_us", "backward_us", "activation_bytes", "output_bytes"):
                assert RANK or mine[key] == theirs[key], (mine["name"], key, mine[key], theirs[key])
