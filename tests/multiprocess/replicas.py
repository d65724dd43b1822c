# SPDX-License-Identifier: Apache-2.0
"""Helpers of the cases with several copies of a model: their data, and how they compare with a plain run."""

import copy

import pytest
import torch
from multiprocess.steps import train_step

import lamina


def batch(copy_number: int, size: int = 8) -> torch.Tensor:
    """Returns what one copy of the model reads."""
    return torch.randn(size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(copy_number))


def share() -> torch.Tensor:
    """Returns what this rank's copy reads."""
    return batch(lamina.dp_rank())


def whole() -> torch.Tensor:
    """Returns what all copies read."""
    return torch.cat([batch(number) for number in range(lamina.dp_size())])


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Asserts that both are equal up to rounding."""
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12), (ours, theirs)


def agrees(tensor: torch.Tensor) -> bool:
    """True where all copies hold the same; collective."""
    values = lamina.allgather(tensor.detach(), lamina.DP_GROUP)
    return all(torch.equal(value, values[0]) for value in values)


def train(module: torch.nn.Module) -> None:
    """Three steps with clipping, compared with the plain loop over the whole batch after each."""
    plain = copy.deepcopy(module)
    model = lamina.distribute(module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    lamina.DistributedOptimizer(optimizers[1])

    step = train_step(model)
    for _ in range(3):
        expected = plain(whole()).square().mean()
        expected.backward()
        losses = lamina.allgather(step(share()).reduce_mean(), lamina.DP_GROUP)
        close(sum(losses) / len(losses), expected)
        for name, parameter in model.local_named_parameters():
            close(parameter.grad, plain.get_parameter(name).grad)
        norms = [
            model.clip_grad_norm_(0.05),
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05),
        ]
        close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.local_named_parameters():
        close(parameter, plain.get_parameter(name))


def train_past_failures(module: torch.nn.Module) -> None:
    """Five steps of which two fail on copy 1 alone and one on all, caught everywhere; compared with the plain loop over
    the whole batch that leaves those out."""
    plain = copy.deepcopy(module)
    model = lamina.distribute(module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    lamina.DistributedOptimizer(optimizers[1])

    @lamina.step
    def step(x, fails):
        if fails == "before":
            raise KeyError("bad batch")
        model.backward(model(x).square().mean())
        if fails:
            raise KeyError("bad batch")

    for number, (first, second) in enumerate(
        [("", ""), ("", "before"), ("", ""), ("", "after"), ("fails", "fails"), ("", "")]
    ):
        mine = second if lamina.dp_rank() == 1 else first
        for optimizer in optimizers:
            optimizer.zero_grad()
        batches = [batch(10 * each + number) for each in range(lamina.dp_size())]
        if second:
            with pytest.raises(KeyError, match="bad batch") as caught:
                step(batches[lamina.dp_rank()], mine)
            assert bool(mine) or "of all replicas; replica 1 met it" in caught.value.remote_traceback
            continue
        step(batches[lamina.dp_rank()], mine)
        plain(torch.cat(batches)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in model.local_named_parameters():
        close(parameter, plain.get_parameter(name))


def train_unevenly(module: torch.nn.Module, batches: list[int], by_everyone: bool = True) -> None:
    """Each copy trains on as many batches as it has in `batches`, in `join`. The plain loop beside it divides the sum
    over the copies that still have a batch by the number of all, or of those."""
    plain = copy.deepcopy(module)
    model = lamina.distribute(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = train_step(model)
    mine = batches[lamina.dp_rank()]
    with model.join(divide_by_initial_world_size=by_everyone):
        for number in range(mine):
            optimizer.zero_grad()
            step(batch(10 * lamina.dp_rank() + number))
            optimizer.step()
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(max(batches)):
        expected.zero_grad()
        there = [each for each, count in enumerate(batches) if number < count]
        for each in there:
            loss = plain(batch(10 * each + number)).square().mean()
            (loss / (len(batches) if by_everyone else len(there))).backward()
        expected.step()
    for name, parameter in model.local_named_parameters():
        close(parameter, plain.get_parameter(name))


def train_on_sizes(module: torch.nn.Module, rounds: list[list[int]], whole_value=lambda parameter: parameter) -> None:
    """One step in each round, in which each copy has a batch of another size; compared with the plain loop over the
    whole batch. `whole_value` makes a whole parameter of one that is cut."""
    plain = copy.deepcopy(module)
    model = lamina.distribute(module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    lamina.DistributedOptimizer(optimizers[1])
    step = train_step(model)
    for number, sizes in enumerate(rounds):
        batches = [batch(10 * number + each, size) for each, size in enumerate(sizes)]
        expected = plain(torch.cat(batches)).square().mean()
        expected.backward()
        loss = step(batches[lamina.dp_rank()])
        losses = lamina.allgather((loss.reduce_mean(), sum(loss.samples)), lamina.DP_GROUP)
        assert [samples for _, samples in losses] == sizes
        close(sum(each * samples for each, samples in losses) / sum(sizes), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.local_named_parameters():
        close(whole_value(parameter), plain.get_parameter(name))
