# SPDX-License-Identifier: Apache-2.0
"""Hooks around the calls of modules that a rank makes itself. Over ranks: tests/multiprocess/cases_hooks.py."""

import pytest
import torch
from python.calls.recorded_calls import record
from torch import nn
from torch.utils.checkpoint import checkpoint

import lamina
from lamina.torch_patches import module_call

X = torch.ones(2, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.0)

    def forward(self, x, fails=False):
        x = self.drop(torch.tanh(self.inner(x)))
        if fails:
            raise ValueError("it")
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, times=1, checkpointed=None, fails=False):
        for _ in range(times):
            if checkpointed is not None:
                x = checkpoint(self.block, x.clone().requires_grad_(), use_reentrant=checkpointed)
                continue
            x = self.block(x, fails)
        return {"x": [x, 1]}


@pytest.fixture
def run():
    """Runs a step of the model; returns what hooks of its block and the inner module of that have heard."""
    lamina.init(microbatches=1)
    model = lamina.DistributedModel(Model())
    recorded = record("block", "block.inner")

    def run(*args, backward=True, grad=True, **kwargs):
        @lamina.step
        def body(x):
            with torch.set_grad_enabled(grad):
                y = model(x, *args, **kwargs)["x"][0]
            if backward:
                model.backward(y.sum())

        try:
            body(X)
        finally:
            run.heard = recorded.take()
        return run.heard

    run.model = model
    return run


FORWARD = "block( block.inner( )block.inner )block"


def test_nested_calls_forward_and_backward(run):
    assert run() == f"{FORWARD} block[ block.inner[ ]block.inner ]block"
    assert run.model.get_module().block.inner.weight.grad is not None


def test_a_module_that_is_called_several_times(run):
    backward = "block[ block.inner[ ]block.inner ]block"
    assert run(times=2) == f"{FORWARD} {FORWARD} {backward} {backward}"


def test_without_gradients_there_is_no_backward(run):
    assert run(backward=False, grad=False) == FORWARD
    assert run(backward=False) == FORWARD


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_is_called_again(run, reentrant):
    heard = run(checkpointed=reentrant).split()
    assert " ".join(heard).startswith(FORWARD)
    assert heard.count("block.inner(") == heard.count(")block.inner") == 2
    assert heard.count("block.inner[") == heard.count("]block.inner") == 1
    again = len(heard) - 1 - heard[::-1].index("block.inner(")
    assert again < heard.index("block.inner[") < heard.index("]block.inner")
    assert (heard.index("block[") < again) != reentrant, "torch's older one makes a graph of the second call alone"


@pytest.mark.parametrize("compiled", ["", "block", "block.inner"])
@pytest.mark.filterwarnings("error:Dynamo does not know")
def test_compiled_code_lets_its_hooked_modules_be_called(run, compiled, monkeypatch):
    torch._dynamo.reset()
    # As where the compiler was imported in a step, which checkpointing does.
    monkeypatch.setattr(torch._dynamo.variables.nn_module, "unpatched_nn_module_call", module_call._call)
    run.model.get_module().get_submodule(compiled).compile(backend="aot_eager")
    for _ in range(3):
        assert run() == f"{FORWARD} block[ block.inner[ ]block.inner ]block"
    if compiled == "block":
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "the rest of it is compiled"


def test_compiled_code_that_has_to_be_one_graph_cannot_call_a_hooked_module(run):
    torch._dynamo.reset()
    run.model.get_module().block.compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_call_hooked"):
        run()


def test_a_call_that_fails_ends_what_it_began(run):
    with pytest.raises(ValueError, match="it"):
        run(fails=True)
    assert run.heard == FORWARD
    assert run().startswith(FORWARD), "the next step is as ever"


def test_without_hooks_a_call_costs_a_look(start):
    model = lamina.DistributedModel(Model())
    lamina.step(lambda x: model(x)["x"][0])(X)
    assert module_call._call_hooked not in module_call._current.calls.values()
