# SPDX-License-Identifier: Apache-2.0
"""Tensors alive on each of two ranks that are one pipeline: during a step, and from step to step."""

import ctypes
import gc
import itertools
import os
import weakref
from typing import ClassVar

import torch
from multiprocess.steps import train_step
from torch import nn

import lamina

RANK = int(os.environ.get("RANK", 0))
WIDTH, ROWS, MICROBATCHES = 256, 64, 8
ACTIVATION = 4 * WIDTH * ROWS  # bytes of a layer's output for a microbatch


class Keeping(torch.autograd.Function):
    """x -> x, and keeps a copy for its backward."""

    kept: ClassVar = []  # 1 for each activation that is kept on this rank from then on, -1 for each that no longer is

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        Keeping.kept.append(1)
        ctx.let_go = weakref.finalize(ctx, Keeping.let_go)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.let_go()  # torch frees what was saved now; the graph itself lives until a thread comes to destroy it
        return gradient

    @staticmethod
    def let_go():
        Keeping.kept.append(-1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Keeping.apply(self.linear(x).relu())


def start(**keys):
    lamina.init(
        partitions=2, microbatches=MICROBATCHES, auto_partition=False, default_partition=0, timeout_s=60, **keys
    )
    layers = [Layer() for _ in range(4)]
    for index, layer in enumerate(layers):
        lamina.set_partition(layer, index // 2)
    model = lamina.distribute(nn.Sequential(*layers))
    Keeping.kept[:] = [sum(Keeping.kept)]
    return model, lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))


def train(model, optimizer, steps):
    step, batch = train_step(model), torch.ones(MICROBATCHES * ROWS, WIDTH)
    for _ in range(steps):
        step(batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def live_bytes():
    """Bytes of the tensors that Python knows, each storage once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and (not isinstance(each, nn.Parameter) or has_value(each)):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def has_value(parameter):
    try:
        return bool(parameter.untyped_storage().data_ptr())
    except RuntimeError:  # it is another rank's
        return False


class Allocated(ctypes.Structure):
    """mallinfo2(3)."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def allocated_bytes():
    """Bytes that the whole process has allocated and not freed, whoever knows of them."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Allocated
    now = mallinfo2()
    return now.uordblks + now.hblkhd


def case_between_steps_a_rank_holds_its_parameters_gradients_and_optimizer_state():
    before = live_bytes()
    model, optimizer = start()
    for steps in (1, 9):
        train(model, optimizer, steps)
        own = list(model.local_parameters())
        counters = 4 * len(own)  # AdamW's
        assert live_bytes() - before == 4 * sum(4 * each.numel() for each in own) + counters
        assert sum(Keeping.kept) == 0


def case_during_a_step_a_rank_holds_the_activations_of_the_window():
    for window in (1, 3):
        model, optimizer = start(active_microbatches=window)
        train(model, optimizer, 3)
        assert 2 <= max(itertools.accumulate(Keeping.kept)) <= 2 * window  # two layers on each rank
        lamina.shutdown()


def growth_of_each(work, times=3):
    """Bytes that every repetition of `work` leaves behind: the least of some. What a new thread of the pool keeps for
    its own computations comes once."""
    sizes = [allocated_bytes()]
    for _ in range(times):
        work()
        sizes.append(allocated_bytes())
    return min(after - before for before, after in itertools.pairwise(sizes))


def case_training_does_not_grow():
    model, optimizer = start()
    train(model, optimizer, 3)
    assert growth_of_each(lambda: train(model, optimizer, 10)) < 5 * ACTIVATION  # half an activation per step


def case_evaluation_with_grad_enabled_does_not_grow():
    model, _ = start()
    evaluate = lamina.step(lambda x: model(x).square().mean())
    batch = torch.ones(MICROBATCHES * ROWS, WIDTH)

    def evaluations():
        for _ in range(20):
            evaluate(batch)
            assert sum(Keeping.kept) == 0

    evaluations()
    assert growth_of_each(evaluations) < 5 * ACTIVATION  # a quarter of an activation per step


def case_a_loop_over_slices_does_not_grow():
    lamina.init(tensor_parallel_degree=2, ddp=True, prescaled_batch=True, timeout_s=60)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    lamina.set_tensor_parallelism(model, plan={"0": "colwise", "1": "rowwise"})
    model = lamina.distribute(model)
    batch = torch.ones(2, 8, requires_grad=True)

    def passes():
        for _ in range(200):
            model(batch).sum().backward()

    passes()
    assert growth_of_each(passes) < 200 * 50  # a collective that is remembered takes more, and a pass has two
