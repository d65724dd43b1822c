# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose weight decay does not depend on the learning rate, but on its schedule (Loshchilov and Hutter,
2019)."""

import contextlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lamina import optim
from lamina.optim.engine_optimizer import changed


class _Decoupled(torch.optim.Optimizer):
    """Multiplies parameters by `1 - weight_decay * lr / initial_lr` before an update without decay."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        lr, decay = group["lr"], group["weight_decay"]
        group.setdefault("initial_lr", lr.clone() if isinstance(lr, torch.Tensor) else lr)
        if decay >= 1e-3:
            warnings.warn(
                f"{type(self).__name__}: weight_decay={decay} multiplies weights by {1 - decay} in each step, whatever "
                "the learning rate is",
                stacklevel=4,
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient, after `closure` has computed the loss again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with contextlib.ExitStack() as without_decay:
            for group in self.param_groups:
                _decay(group)
                without_decay.enter_context(changed(group, {"weight_decay": 0.0}))
            super().step()
        return loss


def _decay(group: dict[str, Any]) -> None:
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not group["weight_decay"] or not parameters:
        return
    initial = float(group.get("initial_lr", group["lr"]))
    factor = float(group["lr"]) / initial if initial else 1.0
    with torch.no_grad():
        torch._foreach_mul_(parameters, 1 - factor * group["weight_decay"])


class DecoupledSGDW(_Decoupled, optim.SGD):
    """SGD with a decoupled weight decay, which is usually much smaller than torch's SGD's.

    Args:
        params, lr, momentum, dampening, nesterov: as torch's SGD has them.
        weight_decay: the part of each weight that a step takes away, as long as the learning rate is the initial one.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
    ):
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


class DecoupledAdamW(_Decoupled, optim.AdamW):
    """AdamW with a decoupled weight decay.

    Args:
        params, lr, betas, eps, amsgrad: as torch's AdamW has them.
        weight_decay: the part of each weight that a step takes away, as long as the learning rate is the initial one.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-5,
        amsgrad: bool = False,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad)


for _kind in (DecoupledSGDW, DecoupledAdamW):
    optim.register_functional_optimizer(_kind, needs="elements")
