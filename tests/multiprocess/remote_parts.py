# SPDX-License-Identifier: Apache-2.0
"""Modules and optimizers of the cases over remote parameters, in a module that every rank can import."""

import torch
from torch import Tensor, nn


class Scale(nn.Module):
    """Multiplies by its weight, or raises."""

    def __init__(self, size: int, value: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), value, dtype=torch.double))

    def forward(self, x, fails=False):
        if fails:
            raise KeyError("no such thing here")
        return x * self.weight


class QHM(torch.optim.Optimizer):
    """Quasi-hyperbolic momentum, as a user's class."""

    def __init__(self, params, lr, momentum, nu):
        if lr < 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "nu": nu})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])
                p.add_(buffer, alpha=-group["lr"] * group["nu"])
                p.add_(p.grad, alpha=-group["lr"] * (1 - group["nu"]))


class PlainQHM(QHM):
    """Another class, for another functional form."""


def qhm_update(
    params: list[Tensor],
    dp_list: list[Tensor],
    momentum_buffer_list: list[Tensor],
    lr: float,
    nu: float,
    momentum: float,
):
    for p, d_p, momentum_buffer in zip(params, dp_list, momentum_buffer_list):  # noqa: B905 -- TorchScript
        momentum_buffer.mul_(momentum).add_(d_p, alpha=1.0 - momentum)
        p.add_(momentum_buffer, alpha=-lr * nu)
        p.add_(d_p, alpha=-lr * (1.0 - nu))


@torch.jit.script
class FunctionalQHM:
    """QHM as the TorchScript recipe has it, mended for torch 2.13."""

    def __init__(self, params: list[Tensor], lr: float, momentum: float, nu: float):
        self.lr = lr
        self.momentum = momentum
        self.nu = nu
        self.params = params
        self.state = torch.jit.annotate(dict[Tensor, dict[str, Tensor]], {})

    def step(self, gradients: list[Tensor | None]):
        params_with_grad = []
        grads = []
        momentum_buffers: list[Tensor] = []
        for param, gradient in zip(self.params, gradients):  # noqa: B905 -- TorchScript
            if gradient is not None:
                if param not in self.state:
                    self.state[param] = {"momentum_buffer": torch.zeros_like(param)}
                params_with_grad.append(param)
                grads.append(gradient)
                momentum_buffers.append(self.state[param]["momentum_buffer"])
        with torch.no_grad():
            qhm_update(params_with_grad, grads, momentum_buffers, self.lr, self.nu, self.momentum)


class PlainFunctionalQHM:
    """A functional form that TorchScript does not compile."""

    def __init__(self, params, **kwargs):
        self.parameters, self.defaults = params, kwargs
        self.optimizer = QHM([nn.Parameter(p) for p in params], **kwargs)

    def step(self, gradients):
        (group,) = self.optimizer.param_groups
        group.update(self.defaults)
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()


class Trust(torch.optim.Optimizer):
    """Has a form in a shared library, tests/optim/trust_plugin.cc: a step of lr times the parameter's norm."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
