# SPDX-License-Identifier: Apache-2.0
"""The optimizer over RRefs of torch.distributed.rpc, which needs no job of lamina's. Each rank runs every case."""

import atexit
import functools
import os
from pathlib import Path

import pytest
import torch
from multiprocess.remote_parts import QHM, FunctionalQHM, Scale
from torch import nn
from torch.distributed import autograd, rpc

import lamina
from lamina.optim import DistributedOptimizer

RANK = int(os.environ.get("RANK", 0))


@functools.cache
def workers():
    """Two workers of torch's RPC, which a process starts once."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{Path(os.environ['DIR'], 'rpc')}", rpc_timeout=60)
    rpc.init_rpc(f"worker{RANK}", rank=RANK, world_size=2, rpc_backend_options=options)
    atexit.register(rpc.shutdown)


def parameter_rrefs(rref):
    return [rpc.RRef(parameter) for parameter in rref.local_value().parameters()]


def called(rref, x):
    return rref.local_value()(x)


def values(rref):
    return [parameter.detach() for parameter in rref.local_value().parameters()]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def train(kind, **arguments):
    """Trains a module of the other worker and the plain one alike; and checks that they are."""
    there = rpc.remote("worker0", model)
    optimizer = DistributedOptimizer(kind, rpc.rpc_sync("worker0", parameter_rrefs, (there,)), **arguments)
    plain = model()
    own = kind(plain.parameters(), **arguments)
    for seed in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("worker0", called, (there, x)).pow(2).sum()])
            optimizer.step(context)
        own.zero_grad()
        plain(x).pow(2).sum().backward()
        own.step()
    for mine, theirs in zip(plain.parameters(), rpc.rpc_sync("worker0", values, (there,)), strict=True):
        torch.testing.assert_close(theirs, mine.detach(), rtol=1e-9, atol=1e-12)


def case_the_update_of_torchs_classes_is_the_engines():
    workers()
    if RANK == 1:
        train(torch.optim.SGD, lr=0.1, momentum=0.9)
        train(torch.optim.AdamW, lr=0.01)
        train(lamina.optim.Adagrad, lr=0.1)


def case_the_tutorials_optimizer_runs_compiled():
    DistributedOptimizer.functional_optim_map[QHM] = FunctionalQHM
    workers()
    if RANK == 1:
        train(QHM, lr=0.1, momentum=0.9, nu=0.7)


def case_bad_input_is_refused_and_an_owners_error_reaches_its_trainer():
    workers()
    if RANK == 1:
        there = rpc.remote("worker0", Scale, (3,))
        rrefs = rpc.rpc_sync("worker0", parameter_rrefs, (there,))
        with pytest.raises(ValueError, match="Invalid learning rate: -1"):
            DistributedOptimizer(torch.optim.SGD, rrefs, lr=-1)
        with pytest.raises(lamina.UsageError, match=r"remote parameters, .* not Parameter"):
            DistributedOptimizer(torch.optim.SGD, [nn.Parameter(torch.ones(1))], lr=1)
        optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
        with pytest.raises(lamina.UsageError, match="the id of a context of torch"):
            optimizer.step(lamina.remote.context())
        with pytest.raises(RuntimeError, match="Could not find autograd context"):
            optimizer.step(12345)
