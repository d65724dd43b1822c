# SPDX-License-Identifier: Apache-2.0
"""Cases of writes to what other ranks returned, for three ranks that are one pipeline. What is written is then what a
plain tensor would be."""

import copy

import pytest
import torch
from python.calls.test_reference_writes import WRITES, WRITES_WITHOUT_GRAD
from torch import nn

import lamina

BATCH = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


class Makes(nn.Linear):
    """Its backward does not need what it returns."""

    def forward(self, x):
        return super().forward(x) + 2


class Writes(nn.Module):
    """Writes to its argument, and returns what it makes of it before and after."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, h, name):
        before = h + self.weight
        WRITES[name](h)
        return before, h * self.weight


def parts():
    torch.manual_seed(0)
    return nn.ModuleDict({"makes": Makes(3, 3), "writes": Writes(), "adds": nn.Linear(3, 3)})


def compare(body, steps=3):
    """`body(parts, x)` gives a list of tensors; they and all gradients of their sum are those of the plain modules."""
    lamina.init(partitions=3, microbatches=2, timeout_s=30, auto_partition=False, default_partition=0)
    modules = parts()
    plain = copy.deepcopy(modules)
    lamina.set_partition(modules["makes"], 1)
    lamina.set_partition(modules["writes"], 2)
    model = lamina.distribute(modules)

    @lamina.step
    def step(x):
        found = body(modules, x)
        model.backward(sum(each.sum() for each in found if each.requires_grad))
        return found

    expected = [body(plain, x) for x in BATCH.chunk(2)]
    for each in expected:
        (sum(part.sum() for part in each if part.requires_grad) / 2).backward()
    for _ in range(steps):
        model.zero_grad()
        found = step(BATCH)
        for index, output in enumerate(found):
            for microbatch, value in enumerate(output.outputs):
                assert torch.allclose(value, expected[microbatch][index]), index
        for name, parameter in model.local_named_parameters():
            grad = plain.get_parameter(name).grad
            assert (parameter.grad is None) == (grad is None), name
            assert grad is None or torch.allclose(parameter.grad, grad, atol=1e-6), name


def written(name, h):
    """Returns what is left of `h` when it has been written to."""
    try:
        (WRITES | WRITES_WITHOUT_GRAD)[name](h)
    except RuntimeError as error:
        assert "inplace" in str(error) or "in-place" in str(error) or "leaf" in str(error), (name, error)
    return h


def case_a_result_of_another_rank_is_written_to():
    def body(parts, x):
        return [written(name, parts["makes"](x)) * (1 + index) for index, name in enumerate(WRITES)]

    compare(body)


def case_a_result_of_another_rank_is_written_to_without_grad():
    def body(parts, x):
        found = []
        with torch.no_grad():
            for name in WRITES_WITHOUT_GRAD:
                found.append(written(name, parts["makes"](x)))
        return [*found, parts["makes"](x)]

    compare(body)


def case_what_was_written_to_is_passed_on():
    def body(parts, x):
        h = parts["makes"](x)
        alias = h.detach()
        h[0].mul_(2)
        h += 1
        before, after = parts["writes"](h, "add_")
        return [before, after, h * 1, alias * 1, parts["adds"](h)]

    compare(body)


# Writes that torch does not count, or after which the tensor is another one.
UNCOUNTED = ("data.mul_", "numpy", "data =", "unsqueeze_")


def a_module_writes_to(h_of):
    """`h_of(parts, x)` is its argument."""

    def body(parts, x):
        found = []
        for index, name in enumerate(name for name in WRITES if name not in UNCOUNTED):
            h = h_of(parts, x)
            view = h[0] * 1 if index % 2 else h[0]
            found += [*parts["writes"](h, name), h * 3, view * 5, parts["adds"](parts["makes"](h))]
        return found

    compare(body)


def case_a_module_of_another_rank_writes_to_what_is_here():
    a_module_writes_to(lambda parts, x: parts["adds"](x) + 1)


def case_a_module_of_another_rank_writes_to_what_is_on_a_third():
    a_module_writes_to(lambda parts, x: parts["makes"](x))


def case_a_module_of_another_rank_writes_to_an_alias_of_what_is_on_a_third():
    a_module_writes_to(lambda parts, x: parts["makes"](x).detach())


def case_an_argument_that_another_rank_gives_another_shape_is_an_error():
    def body(parts, x):
        return list(parts["writes"](parts["makes"](x), "unsqueeze_"))

    with pytest.raises(lamina.UsageError, match=r"^writes, .* changed the shape .*\[2, 3\] .*\[1, 2, 3\].*"):
        compare(body)
