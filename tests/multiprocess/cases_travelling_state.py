# SPDX-License-Identifier: Apache-2.0
"""Cases for two ranks that are one pipeline: state of a thread or a process that travels with a call."""

import contextvars
import os

import pytest
import torch
import torch.nn.functional as F
from multiprocess.drawing import BATCH, assert_different, assert_same, train
from torch import nn

import lamina

RANK = int(os.environ.get("RANK", 0))
SCHEDULES = ("simple", "interleaved", "zero_bubble")
X = BATCH.float()


def two(second):
    """A distributed model whose part "0" is on rank 0, and `second` on rank 1."""
    lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0)
    model = nn.Sequential(nn.Linear(6, 6), second)
    lamina.set_partition(second, 1)
    return lamina.distribute(model)


# Random numbers.


def case_random_numbers_are_those_of_one_rank():
    alone = train(1, replica=0)
    for schedule in SCHEDULES:
        for root in (0, 1):
            assert_same(train(2, schedule=schedule, default_partition=root), alone)
    assert_different(train(2, manual_seed=6), alone)
    losses = torch.cat(alone.losses)
    assert len(losses.unique()) == len(losses) == 8, "each microbatch of each step has numbers of its own"


def in_checkpoints(reentrant):
    alone = train(1, replica=0)
    assert_same(train(1, replica=0, reentrant=reentrant), alone)
    for schedule in SCHEDULES:
        assert_same(train(2, reentrant=reentrant, schedule=schedule), alone)


def case_random_numbers_are_drawn_again_when_a_checkpoint_recomputes():
    in_checkpoints(reentrant=False)


def case_random_numbers_are_drawn_again_when_a_reentrant_checkpoint_recomputes():
    in_checkpoints(reentrant=True)


def case_a_configured_seed_counts_instead_of_the_processs():
    alone = train(1, replica=0, seed=3)
    assert_same(train(2, seed=3), alone)
    other = train(2, seed=3, manual_seed=6)
    assert all(torch.equal(a, b) for a, b in zip(other.losses, alone.losses, strict=True))
    assert_different(train(2, seed=4), alone)


def case_replicas_draw_as_one_world_with_all_their_microbatches():
    whole = train(2)
    half = train(1, microbatches=2, batch=BATCH[4 * RANK : 4 * RANK + 4])
    for losses, all_losses in zip(half.losses, whole.losses, strict=True):
        assert torch.equal(losses, all_losses[2 * RANK : 2 * RANK + 2])


def case_a_hook_that_draws_does_so_wherever_its_module_lives():
    def drop(module, args, output):
        return F.dropout(output, 0.5)

    outputs = []
    for partitions in (1, 2):
        lamina.init(partitions=partitions, microbatches=4, timeout_s=30)
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model = lamina.distribute(module)
        for part in module:
            part.register_forward_hook(drop)
        torch.manual_seed(5)
        output = lamina.step(lambda x, model=model: model(x))(X).concat()
        outputs.append(lamina.allgather(output, lamina.WORLD)[0])
        lamina.shutdown()
    assert torch.equal(*outputs)


class DrawsInBackward(nn.Linear):
    class Draw(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient * torch.rand(())

    def forward(self, x):
        return self.Draw.apply(F.dropout(super().forward(x), 0.5))


def case_numbers_drawn_in_a_backward_change_those_of_no_other_microbatch():
    losses = []
    for backward in (False, True):
        model = two(DrawsInBackward(6, 6))

        @lamina.step
        def step(x, model=model, backward=backward):
            loss = model(x).square().mean()
            if backward:
                model.backward(loss)
            return F.dropout(loss, 0.0), loss

        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        torch.manual_seed(5)
        losses.append([step(X)[1].stack() for _ in range(2)])
        lamina.shutdown()
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


class RaisesAfterADraw(nn.Linear):
    def forward(self, x):
        torch.rand(3)
        torch.set_default_dtype(torch.float64)
        raise KeyError("mine")


def case_a_step_that_fails_leaves_the_processs_state_as_one_that_does_not():
    model = two(RaisesAfterADraw(6, 6))
    torch.manual_seed(5)
    with pytest.raises(KeyError):
        lamina.step(lambda x: (torch.rand(3), model(x)))(X)
    failed = torch.get_rng_state()
    assert torch.get_default_dtype() == torch.float32
    torch.manual_seed(5)
    lamina.step(lambda x: torch.rand(3))(X)
    assert torch.equal(torch.get_rng_state(), failed)


# Default dtype.


class Makes(nn.Linear):
    """Tells the default dtype, and changes it."""

    def forward(self, x):
        made = torch.ones(())
        torch.set_default_dtype(torch.float16)
        return super().forward(x), made.dtype


def case_the_default_dtype_is_that_of_the_caller_and_stays_with_its_microbatch():
    model = two(Makes(6, 6))

    @lamina.step
    def step(x):
        before = torch.get_default_dtype()
        if x[0, 0] == X[0, 0]:
            torch.set_default_dtype(torch.float64)
        _, seen = model(x)
        return before, seen, torch.get_default_dtype()

    for _ in range(2):
        before, seen, after = step(X)
        assert before == [torch.float32] * 4
        assert seen == after == [torch.float64] + [torch.float32] * 3
        assert torch.get_default_dtype() == torch.float32


def case_the_default_dtype_at_entry_of_the_step_holds_in_it():
    model = two(Makes(6, 6))
    torch.set_default_dtype(torch.float64 if RANK == 0 else torch.float32)
    try:
        assert lamina.step(lambda x: model(x)[1])(X) == [torch.float64] * 4
        assert torch.get_default_dtype() == (torch.float64 if RANK == 0 else torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)


# Context variables and modes of torch functions.

variable = contextvars.ContextVar("variable", default="unset")


class Reads(nn.Linear):
    def forward(self, x):
        seen = variable.get()
        variable.set("changed in a module")
        return super().forward(x), (seen, torch.ones(()).device.type)


def case_context_variables_on_a_serving_rank_are_those_at_entry_of_its_step():
    model = two(Reads(6, 6))
    step = lamina.step(lambda x: model(x)[1][0])
    assert step(X) == ["unset"] * 4
    token = variable.set(f"on rank {RANK}")
    assert step(X) == ["on rank 1"] * 4
    assert variable.get() == f"on rank {RANK}"
    variable.reset(token)
    assert step(X) == ["unset"] * 4


class Seen:
    """Keeps what it is called with, of all microbatches: as an object of a library's, for one of the script's own is
    not to be changed by several."""

    __module__ = "torch"

    def __init__(self):
        self.values = []

    def add(self, value):
        self.values.append(value)


seen_in_backward = Seen()


class ReadsInBackward(nn.Linear):
    class Read(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            seen_in_backward.add(variable.get())
            return gradient

    def forward(self, x):
        return self.Read.apply(super().forward(x))


def case_context_variables_in_a_backward_are_those_of_the_forward():
    model = two(nn.Sequential(ReadsInBackward(6, 6)))

    @lamina.step
    def step(x):
        model.backward(model(x).square().mean())

    token = variable.set(f"on rank {RANK}")
    step(X)
    variable.reset(token)
    assert seen_in_backward.values == ["on rank 1"] * (0, 4)[RANK]


def case_a_function_mode_around_the_step_holds_on_every_rank():
    model = two(Reads(6, 6))
    with torch.device("meta"):
        assert lamina.step(lambda x: model(x)[1][1])(X) == ["meta"] * 4
    assert lamina.step(lambda x: model(x)[1][1])(X) == ["cpu"] * 4


def case_a_function_mode_inside_the_step_is_refused_around_a_remote_call():
    model = two(Reads(6, 6))

    @lamina.step
    def step(x):
        with torch.device("meta"):
            return model(x)[1]

    with pytest.raises(lamina.UsageError, match=r"call of 1, .* on another rank, inside a torch function mode"):
        step(X)

    @lamina.step
    def local_step(x):
        with torch.device("meta"):
            made = torch.ones(()).device.type
        return made, model(x)[1][1]

    assert local_step(X) == (["meta"] * 4, ["cpu"] * 4)
