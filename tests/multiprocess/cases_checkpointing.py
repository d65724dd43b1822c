# SPDX-License-Identifier: Apache-2.0
"""Cases of activation checkpointing for two ranks that are one pipeline."""

import contextlib
import copy
import functools
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import lamina

RANK = int(os.environ.get("RANK", 0))
BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SCHEDULES = ("simple", "interleaved", "zero_bubble")


class Log:
    """Keeps what it is called with, of all microbatches in whatever order: as an object of a library's, for one of the
    script's own is not to be changed by several."""

    __module__ = "torch"

    def __init__(self):
        self.held = []

    def __call__(self, each):
        self.held.append(each)


class Block(nn.Module):
    """Counts its runs, and knows what it computed on its way."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)
        self.runs = 0
        self.activations = Log()

    def forward(self, x, scale=1.0):
        self.runs += 1
        hidden = self.layer(x)
        self.activations(StorageWeakRef(hidden.untyped_storage()))
        return self.dropout(F.gelu(hidden)) * scale + x


class CountsActivations(nn.Module):
    """Passes on what it gets, and counts what is still held of the activations of its rank's blocks."""

    def __init__(self, blocks):
        super().__init__()
        self.__dict__["blocks"] = blocks
        self.held = 0

    def forward(self, x):
        refs = [ref for block in self.blocks for ref in block.activations.held]
        self.held = sum(not ref.expired() for ref in refs)
        return x.clone()


def seeded(make):
    torch.manual_seed(0)
    return make()


def placed(module, *partitions):
    """`module`, its children on the partitions given."""
    for child, partition in zip(module.children(), partitions, strict=True):
        lamina.set_partition(child, partition)
    return module


def start(**keys):
    lamina.init(
        **(
            {"partitions": 2, "microbatches": 4, "timeout_s": 30}
            | {"auto_partition": False, "default_partition": 0}
            | keys
        )
    )


def train(model, prepare=None, call=None, x=BATCH, context=contextlib.nullcontext, **keys):
    """(loss, gradients of this rank) of one step in a job of its own; `model` is used up."""
    lamina.shutdown()
    start(**keys)
    if prepare is not None:
        prepare(model)
    wrapped = lamina.distribute(model)
    call = call or (lambda model, x: model(x))

    @lamina.step
    def step(x):
        with context():
            loss = call(model, x).square().mean()
            wrapped.backward(loss)
        return loss

    torch.manual_seed(5)
    loss = step(x).reduce_mean()
    return loss, {name: parameter.grad for name, parameter in wrapped.local_named_parameters()}


def mark_first(model):
    lamina.set_activation_checkpointing(model[0])


def mark_inner(model):
    lamina.set_activation_checkpointing(model[1])


def assert_equal(found, expected, tolerance=1e-9):
    assert torch.allclose(found[0], expected[0], rtol=tolerance, atol=tolerance)
    for name, gradient in found[1].items():
        assert (gradient is None) == (expected[1][name] is None), name
        assert gradient is None or torch.allclose(gradient, expected[1][name], rtol=tolerance, atol=tolerance), name


def plain(model, call=None):
    """(loss, gradients) of the model without lamina."""
    loss = (call or (lambda model, x: model(x)))(model, BATCH).square().mean()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def runs(model):
    """Numbers of runs of the blocks on this rank, with four microbatches."""
    return {block.runs for block in model.modules() if isinstance(block, Block) and block.runs}


STRATEGIES = ("each", "contiguous", "group_2")


def chains():
    """A chain for each strategy."""
    return nn.Sequential(*(placed(chain(), 0, 1, 1, 1, 0, 0) for _ in STRATEGIES))


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6)))


def case_checkpointed_children_train_alike_on_every_rank_under_every_strategy():
    def mark(model):
        for part, strategy in zip(model, STRATEGIES, strict=True):
            lamina.set_activation_checkpointing(part, strategy=strategy)

    expected = plain(chains())
    for schedule in SCHEDULES:
        model = chains()
        assert_equal(train(model, mark, schedule=schedule), expected)
        assert runs(model) == {8}


def case_checkpoint_sequential_trains_alike_on_every_rank():
    def call(model, x):
        for part, strategy in zip(model, STRATEGIES, strict=True):
            x = lamina.checkpoint_sequential(part, x, strategy)
        return x

    model = chains()
    assert_equal(train(model, call=call), plain(chains()))
    assert runs(model) == {8}


def case_a_checkpointed_owner_holds_no_activations():
    for strategy, count in (None, 3), ("each", 0), ("contiguous", 0), ("group_2", 0):
        blocks = chain()[:3]
        model = placed(nn.Sequential(blocks, CountsActivations(blocks)), 0, 1)
        placed(blocks, 1, 1, 1)
        mark = functools.partial(lamina.set_activation_checkpointing, strategy=strategy)
        train(model, strategy and (lambda model, mark=mark: mark(model[0])), microbatches=1)
        assert model[1].held == (count if RANK == 1 else 0), strategy


def case_dropout_on_the_owner_is_the_same_in_both_runs():
    def dropping():
        torch.manual_seed(0)
        return placed(nn.Sequential(*(Block(dropout=0.5) for _ in range(4))), 0, 1, 1, 0)

    expected = train(dropping(), microbatches=1)
    found = train(dropping(), lamina.set_activation_checkpointing, microbatches=1)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(gradient, expected[1][name]) for name, gradient in found[1].items())


class Around(nn.Module):
    """Checkpoints, by torch's own means, a call of its child and something of its own."""

    def __init__(self, child, use_reentrant):
        super().__init__()
        self.own = Block()
        self.child = child
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = x if x.requires_grad else x.clone().requires_grad_()
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant) + x

    def inner(self, x):
        return F.gelu(self.own(self.child(self.own(x))))


def around():
    """Both kinds, on both ranks, around children of both ranks."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for use_reentrant in (True, False):
        for where, child in ((0, 0), (0, 1), (1, 1), (1, 0)):
            model.append(Around(Block(), use_reentrant))
            lamina.set_partition(model[-1], where)
            lamina.set_partition(model[-1].child, child)
    return model


def case_torchs_own_checkpoint_around_local_and_remote_children():
    expected = plain(around())
    for schedule in SCHEDULES:
        assert_equal(train(around(), schedule=schedule), expected)


class Activated(nn.Module):
    """Calls a module without parameters, which may run on either rank, on what another rank gives."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.activation = nn.GELU()
        lamina.set_partition(self.linear, 1)

    def forward(self, x):
        return self.activation(self.linear(x)) + x


class Twice(nn.Module):
    """Calls a module first in a checkpoint, then as it is: the second call has what came for the first."""

    def __init__(self):
        super().__init__()
        self.inner = Activated()
        self.activation = self.inner.activation  # of two modules

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) + self.inner(x)


def case_a_module_that_may_run_anywhere_saves_as_much_in_the_second_run():
    make = lambda: seeded(lambda: nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), Twice()))  # noqa: E731
    assert_equal(train(make(), active_microbatches=2), plain(make()))


class Split(nn.Module):
    """Goes to the other rank and back, and there too."""

    def __init__(self, here, there):
        super().__init__()
        self.first = Block()
        self.there = there
        self.last = Block()
        placed(self, here, 1 - here, here)

    def forward(self, x, *, scale=1.0):
        return self.last(F.gelu(self.there(self.first(x))), scale=scale)


def split():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Split(0, Split(1, Block())), Block())


def case_a_checkpointed_module_whose_children_live_apart():
    expected = plain(split())
    for schedule in SCHEDULES:
        model = split()
        assert_equal(train(model, mark_inner, schedule=schedule), expected)
        inside = [module for module in model[1].modules() if isinstance(module, Block)]
        assert {block.runs for block in inside} == {0, 8}  # elsewhere, and here


def case_nested_checkpoints_across_ranks():
    expected = plain(split())

    def mark(model):
        lamina.set_activation_checkpointing(model, strategy="contiguous")
        for module in model[1].modules():
            lamina.set_activation_checkpointing(module)

    for schedule in SCHEDULES:
        assert_equal(train(split(), mark, schedule=schedule), expected)


def case_a_split_module_holds_no_activations_on_any_rank():
    for mark, held in ((None, (2, 1)), (mark_first, (0, 0))):
        module = Split(0, Block())
        counts = [CountsActivations([part for part in module.modules() if isinstance(part, Block)]) for _ in range(2)]
        train(placed(nn.Sequential(module, *counts), 0, 0, 1), mark, microbatches=1)
        assert counts[RANK].held == held[RANK]


def case_a_split_module_called_twice_with_keywords():
    def call(model, x):
        return model[2](model[1](model[1](model[0](x), scale=0.5), scale=2.0))

    assert_equal(train(split(), mark_inner, call), plain(split(), call))


def case_a_call_of_a_split_module_is_checkpointed():
    def call(model, x):
        return lamina.checkpoint(model[1], x, scale=x.new_tensor(0.5))

    assert_equal(train(split(), call=call), plain(split(), lambda model, x: model[1](x, scale=0.5)))


def case_a_call_of_a_remote_module_is_checkpointed():
    def call(model, x):
        return lamina.checkpoint(model[1], model[0](x))

    model = placed(chain()[:2], 0, 1)
    assert_equal(train(model, call=call), plain(chain()[:2]))
    assert model[RANK].runs == (4, 8)[RANK]


class Structures(nn.Module):
    def __init__(self):
        super().__init__()
        self.there = Block()
        lamina.set_partition(self.there, 1)

    def forward(self, pair, *, masks):
        y = self.there(pair[0] * pair[1])
        return {"y": y, "all": [y * masks["a"], None, 3, masks["a"]], "positions": masks["b"]}


def case_structures_through_a_split_checkpoint():
    def call(model, x):
        masks = {"a": x.new_ones(6), "b": torch.arange(3)}
        output = model[1]((model[0](x), x), masks=masks)
        assert list(output) == ["y", "all", "positions"] and output["all"][1:3] == [None, 3]
        assert torch.equal(output["positions"], torch.arange(3))
        return output["y"] + output["all"][0] * output["all"][3]

    def build():
        torch.manual_seed(0)
        return nn.Sequential(Block(), Structures())

    assert_equal(train(build(), mark_inner, call), plain(build(), call))


class Box:
    def __init__(self, value):
        self.value = value


class Boxes(Structures):
    def forward(self, x):
        return Box(self.there(x))


def case_a_result_whose_gradient_would_be_lost_is_an_error():
    def call(model, x):
        return model[0](x).value

    def build():
        return nn.Sequential(Boxes())

    with pytest.raises(lamina.UsageError, match=r"^a Boxes, .* returned tensors in an object of type Box.*dataclasses"):
        train(build(), mark_first, call)
    assert_equal(train(seeded(build), call=call), plain(seeded(build), call))


class RaisesAgain(Block):
    def forward(self, x):
        if self.runs == 1:
            raise ZeroDivisionError("in the second run")
        return super().forward(x)


def case_an_error_in_the_second_run_keeps_its_type_on_every_rank():
    def mark(model):
        model[1].there = RaisesAgain()
        placed(model[1], 0, 1, 0)
        mark_inner(model)

    with pytest.raises(ZeroDivisionError, match="in the second run"):
        train(split(), mark, microbatches=1)


def case_a_frozen_split_module_passes_gradients_on_and_needs_none():
    def build():
        model = split()
        model[1].requires_grad_(False)
        return model

    def call(model, x):
        assert not model[1](x).requires_grad
        return model(x)

    assert_equal(train(build(), mark_inner, call), plain(build(), call))


def case_checkpoints_under_autocast_with_the_backward_inside():
    def cast(mark=None):
        context = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
        return train(split().float(), mark, x=BATCH.float(), context=context)

    expected = cast()
    for mark in (mark_inner, lamina.set_activation_checkpointing):
        assert_equal(cast(mark), expected, tolerance=1e-3)


def case_it_may_be_set_on_the_distributed_model_before_and_after_it_is_partitioned():
    start()
    wrapped = lamina.distribute(placed(seeded(chain)[:2], 0, 1))
    own = wrapped.module[RANK]

    @lamina.step
    def step(x):
        wrapped.backward(wrapped(x).square().mean())

    lamina.set_activation_checkpointing(wrapped.module[0])
    step(BATCH)
    assert own.runs == (8, 4)[RANK]
    lamina.set_activation_checkpointing(wrapped.get_module()[1])
    step(BATCH)
    assert own.runs == (16, 12)[RANK]


def case_checkpointed_modules_are_evaluated_once():
    model = split()
    start()
    for part in model:
        lamina.set_activation_checkpointing(part)
    wrapped = lamina.distribute(copy.deepcopy(model))
    step = lamina.step(lambda x: wrapped(x))
    with torch.no_grad():
        output = step(BATCH).concat()
        assert torch.allclose(output, split()(BATCH), atol=1e-9)
    assert runs(wrapped) == {4}


def case_dropout_on_other_ranks_is_the_same_in_both_runs():
    def dropping():
        torch.manual_seed(0)
        model = split()
        for block in model.modules():
            if isinstance(block, Block):
                block.dropout.p = 0.5
        return model

    for schedule in SCHEDULES:
        expected = train(dropping(), schedule=schedule)
        for mark in (mark_inner, lambda model: lamina.set_activation_checkpointing(model, strategy="contiguous")):
            assert_equal(train(dropping(), mark, schedule=schedule), expected)
