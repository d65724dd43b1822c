# SPDX-License-Identifier: Apache-2.0
"""Hooks around calls of modules over two ranks: the owner's are called, whoever calls."""

import pytest
import torch
from python.calls.recorded_calls import record
from torch import nn

import lamina

_BATCH = torch.ones(4, 6)


class _Outer(nn.Module):
    """On rank 1; the module in it is on rank 0."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.back = nn.Linear(6, 6)

    def forward(self, x, fails=False):
        if fails:
            raise ValueError("it")
        return self.back(torch.tanh(self.linear(x)))


class _Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(6, 6)
        self.outer = _Outer()
        self.run = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x, **kwargs):
        return self.run(self.outer(self.own(x), **kwargs))


def _start(again=False, compiled=False):
    """The model, and what each rank's hooks have heard of a step."""
    lamina.init(partitions=2, microbatches=1, auto_partition=False, default_partition=0, timeout_s=30)
    torch.manual_seed(0)
    module = _Hooked()
    for part in (module.outer, module.run[0], module.run[1]):
        lamina.set_partition(part, 1)
    lamina.set_partition(module.outer.back, 0)
    model = lamina.distribute(module)
    if compiled:
        module.compile(backend="eager")
        module.outer.compile(backend="eager")
    if again:
        lamina.set_activation_checkpointing(module.outer)
    recorded = record("own", "outer", "outer.linear", "outer.back", "run.1")

    @lamina.step
    def step(x, **kwargs):
        loss = model(x, **kwargs).sum()
        if torch.is_grad_enabled():
            model.backward(loss)
        return loss

    def heard(**kwargs):
        try:
            step(_BATCH, **kwargs)
        finally:
            said = lamina.allgather(recorded.take(), lamina.WORLD)
        return said

    return heard


_FOLLOWS = "~outer( outer.linear( )outer.linear ~)outer ~run.1( ~)run.1"


def case_owners_hear_of_each_call_and_of_its_backward_whoever_calls():
    heard = _start()
    for _ in range(2):  # the second is predicted
        leading, following = heard()
        assert leading == "own( )own ~outer.back( ~)outer.back ~outer.back[ ~]outer.back own[ ]own"
        assert following == _FOLLOWS + " ~run.1[ ~]run.1 ~outer[ outer.linear[ ]outer.linear ~]outer"


def case_owners_hear_of_calls_in_compiled_code():
    heard = _start(compiled=True)
    for _ in range(2):
        leading, following = heard()
        assert leading == "own( )own ~outer.back( ~)outer.back ~outer.back[ ~]outer.back own[ ]own"
        assert following == _FOLLOWS + " ~run.1[ ~]run.1 ~outer[ outer.linear[ ]outer.linear ~]outer"


def case_what_is_computed_again_for_a_backward_is_called_again():
    leading, following = _start(again=True)()
    twice = "~outer.back( ~)outer.back ~outer.back( ~)outer.back"
    assert leading == f"own( )own {twice} ~outer.back[ ~]outer.back own[ ]own"
    again = "~outer[ outer.linear( )outer.linear outer.linear[ ]outer.linear ~]outer"
    assert following == f"{_FOLLOWS} ~run.1[ ~]run.1 {again}"


def case_without_gradients_owners_hear_of_no_backward():
    heard = _start()
    with torch.no_grad():
        assert heard() == ["own( )own ~outer.back( ~)outer.back", _FOLLOWS]


def case_a_call_that_fails_on_another_rank_ends_there():
    heard = _start()
    heard()
    with pytest.raises(ValueError, match="it"):
        heard(fails=True)
    leading, following = heard()
    assert "own[ ]own" in leading and following.startswith(_FOLLOWS)
