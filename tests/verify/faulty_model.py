# SPDX-License-Identifier: Apache-2.0
"""A model of which one layer may do something wrong."""

import functools
import os

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from verify.faults import AT

import lamina

SIZE, CLASSES, LAYERS = 8, 4, 4
VARIABLE = "SCALE_OF_LAYERS"


class Doubled(torch.autograd.Function):
    """Doubles gradients on their way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class State:
    """A fault, and the beginning of what modules share behind the back of all that watches."""

    def __init__(self, fault):
        self.fault = fault
        self.is_here = "LAMINA_VERIFY_COLLAPSED" not in os.environ
        os.environ.pop(VARIABLE, None)
        for function in (cached, table):
            function.cache_clear()
        if hasattr(nn.Identity, VARIABLE):
            delattr(nn.Identity, VARIABLE)
        os.umask(0o22)
        torch.set_flush_denormal(False)


@functools.lru_cache
def cached():
    return [1.0]


@functools.lru_cache
def table():
    return numpy.ones(1)


class Dropout(nn.Module):
    """Dropout that a fault may spoil."""

    def __init__(self, rate, state, is_spoiled):
        super().__init__()
        self.rate, self.__dict__["state"], self.is_spoiled = rate, state, is_spoiled

    def forward(self, x):
        rate, spoiled = self.rate, self.is_spoiled and self.state[0].is_here
        match self.state[0].fault if spoiled else "":
            case "evaluation":
                return x.clone()
            case "other_stream":
                with torch.random.fork_rng():
                    torch.manual_seed(3)
                    return F.dropout(x, rate)
            case "one_more_draw":
                torch.rand(1)
            case "other_rate_of_dropout":
                rate = 0.2
        return F.dropout(x, rate)


class Norm(nn.BatchNorm1d):
    """BatchNorm that a fault may spoil."""

    def __init__(self, state, is_spoiled):
        super().__init__(SIZE)
        self.__dict__["state"], self.is_spoiled, self.__dict__["waiting"] = state, is_spoiled, []

    def forward(self, x):
        spoiled = self.is_spoiled and self.state[0].is_here
        match self.state[0].fault if spoiled else "":
            case "running_statistics":
                return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
            case "momentum_of_norm":
                self.momentum = 0.2
            case "norm_twice":
                super().forward(x.detach())
            case "order_of_norm":
                self.waiting.append(x.detach())
                if len(self.waiting) == 2:
                    for each in reversed(self.waiting):
                        super().forward(each)
                    self.waiting.clear()
                return F.batch_norm(x, None, None, self.weight, self.bias, training=True)
        return super().forward(x)


class Linear(nn.Linear):
    """A linear layer that a fault may spoil."""

    def __init__(self, state, is_spoiled):
        super().__init__(SIZE, SIZE)
        self.__dict__["state"], self.is_spoiled, self.__dict__["first"] = state, is_spoiled, []

    def forward(self, x):
        spoiled = self.is_spoiled and self.state[0].is_here
        match self.state[0].fault if spoiled else "":
            case "old_weight":
                self.first or self.first.append(self.weight.detach().clone())
                return F.linear(x, self.weight + (self.first[0] - self.weight).detach(), self.bias)
            case "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    return super().forward(x)
            case "hook_on_weight":
                if self.weight.requires_grad and not self.first:
                    self.first.append(self.weight.register_hook(lambda gradient: 1.5 * gradient))
        return super().forward(x)


class Layer(nn.Module):
    def __init__(self, number, state):
        super().__init__()
        self.number, self.__dict__["state"] = number, state
        spoiled = number == AT
        self.linear, self.norm = Linear(state, spoiled), Norm(state, spoiled)
        self.dropout = Dropout(0.1, state, spoiled)
        self.__dict__["seen"] = []

    def forward(self, x):
        state = self.state[0]
        spoiled = self.number == AT and state.is_here
        rows = x.flip(0) if spoiled and state.fault == "rows_mixed" else x
        y = self.dropout(torch.relu(self.norm(self.linear(rows))))
        z = x + (self.spoiled(y, state) if spoiled else y)
        return z * self.shared(state)

    def spoiled(self, y, state):
        self.seen.append(y.detach())
        match state.fault:
            case "output" | "sharded_output":
                return y * 1.001
            case "output_of_a_copy":
                return y * 1.001 if lamina.rank() == 1 else y
            case "sign":
                return -y
            case "noise":
                return y + 0.01 * torch.randn_like(y)
            case "shuffled":
                return y.flip(0)
            case "not_finite":
                return torch.where(y == y.max(), torch.inf, y)
            case "not_a_number":
                return torch.where(y == y.max(), torch.nan, y)
            case "half":
                return y.bfloat16().float()
            case "averaged":
                return y.mean(0, keepdim=True).expand_as(y)
            case "one_element":
                return y + 0.05 * F.one_hot(torch.tensor(5), y.numel()).view_as(y)
            case "offset":
                return y + 1e-2
            case "skipped_module":
                return torch.zeros_like(y)
            case "second_microbatch":
                return y * (1.01 if len(self.seen) % 2 == 0 else 1)
            case "second_step":
                return y * (1.01 if len(self.seen) > 2 else 1)
            case "other_microbatch":
                return y + (self.seen[max(len(self.seen) - 2, 0)] - y).detach()
            case "doubled_gradient":
                return Doubled.apply(y)
            case "dropped_gradient":
                return y.detach()
            case "dropped_part":
                return torch.cat([y[:1].detach(), y[1:]])
        return y

    def shared(self, state):
        """A factor that the first layer writes, on its own rank, and the spoiled one reads."""
        writes, reads = self.number == 0, self.number == AT
        scale = 1.0
        match state.fault:
            case "array":
                table()[0] = 2 if writes else table()[0]
                scale = float(table()[0])
            case "cached_function":
                cached()[0] = 2.0 if writes else cached()[0]
                scale = cached()[0]
            case "environment":
                if writes:
                    os.environ[VARIABLE] = "2"
                scale = float(os.environ.get(VARIABLE, "1"))
            case "umask":
                if writes:
                    os.umask(0o77)
                os.umask(before := os.umask(0))
                scale = 2.0 if before == 0o77 else 1.0
            case "class_attribute":
                if writes:
                    setattr(nn.Identity, VARIABLE, 2.0)
                scale = getattr(nn.Identity, VARIABLE, 1.0)
            case "denormal_numbers":
                if writes:
                    torch.set_flush_denormal(True)
                tiny = torch.tensor(1e-310, dtype=torch.float64)
                scale = 2.0 if float(tiny * 0.5) == 0 else 1.0
        return scale if reads else 1.0


class Model(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.layers = nn.Sequential(*[Layer(number, state) for number in range(LAYERS)])
        self.head = nn.Linear(SIZE, CLASSES)
        self.__dict__["state"] = state

    def forward(self, x):
        y = self.head(self.layers(x))
        return y.double() if self.state[0].is_here and self.state[0].fault == "dtype" else y
