# SPDX-License-Identifier: Apache-2.0
"""Measures of the moments and updates of DecoupledAdamW, for which each rank adds up what it has of a parameter."""

import math
from typing import Any

import torch

from lamina import _lamina
from lamina.composer.optimizers import DecoupledAdamW
from lamina.job import current
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD
from lamina.optim.optimizer_state import OptimizerState

Sums = list[float]  # the number of elements, and of all products of two of: gradient, moment, update, parameter, second


class AdamMetrics:
    """The measures of updates, until it is closed. All ranks make it.

    Args:
        optimizer: a DistributedOptimizer.
    """

    def __init__(self, optimizer: DecoupledAdamW):
        self._own: dict[str, Sums] = {}  # of the last update
        self._counts: dict[str, float] = {}
        # After it gradients, states and options are those of that update, which nothing has dropped or changed yet.
        self._hook = optimizer.register_step_post_hook(self._measure)

    def close(self) -> None:
        """Measures no more."""
        self._hook.remove()

    def measured(self, sizes: dict[str, int]) -> dict[str, float]:
        """The measures of the last update by name, of parameters with these names and numbers of elements. All ranks
        call it."""
        everyone, metrics, self._own = allgather(self._own, WORLD), {}, {}
        for name, size in sizes.items():
            parts = [of_rank[name] for of_rank in everyone if name in of_rank]
            if not parts:
                continue
            count, *sums = map(math.fsum, zip(*parts, strict=True))
            copies = count / size  # of each element, on as many ranks
            measures = _measures([each / copies for each in sums])
            metrics |= {f"{kind}/{name}": value for kind, value in measures.items()}
        return metrics

    def _measure(self, optimizer: DecoupledAdamW, *_: Any) -> None:
        job = current.job()
        (known,) = (each for each in job.optimizers if each.optimizer is optimizer)
        scale = job.loss_scale.value
        members = [(group, each) for group in optimizer.param_groups for each in group["params"]]
        measured = {}
        for name, (group, each) in zip(known.local_names(), members, strict=True):
            if each.grad is None:
                continue
            if name not in self._counts:
                self._counts[name] = _count(each, known)
            measured[name] = _sums(each, dict.get(optimizer.state, each), group, scale)
        self._own = {name: [self._counts[name], *sums.tolist()] for name, sums in measured.items()}


def _count(local: torch.Tensor, known: OptimizerState) -> float:
    """How many elements of a parameter are in what stands for it here, which may be longer."""
    parameter = known.parameter_of(local)
    if parameter is local:
        return local.numel()
    part = known.part_of_state(local, parameter, {"exp_avg": torch.ones(parameter.shape)})
    return part["exp_avg"].double().sum().item() if part else 0.0


def _sums(parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any], scale: float) -> torch.Tensor:
    with torch.no_grad(), _lamina.Unguarded():  # of a slice, for sums over all
        count, rate, (beta1, beta2) = float(state["step"]), float(group["lr"]), group["betas"]
        second, moment = state["exp_avg_sq"].double(), state["exp_avg"].double()
        largest = state["max_exp_avg_sq"].double() if group["amsgrad"] else second
        under = largest.sqrt() / math.sqrt(1 - beta2**count) + group["eps"]
        step = rate / (1 - beta1**count) * moment / under
        initial = float(group["initial_lr"])
        decay = group["weight_decay"] * (rate / initial if initial else 1.0)
        gradient, value = parameter.grad.double() / scale, parameter.double()
        update = (step + decay * value) / (1 - decay)  # from the value before it
        pairs = (
            *((gradient, gradient), (moment, moment), (update, update), (value, value), (second, second)),
            *((gradient, moment), (gradient, update)),
        )
        return torch.stack([(one * other).sum() for one, other in pairs])


def _measures(sums: list[float]) -> dict[str, float]:
    gradient, moment, update, value, second = map(math.sqrt, sums[:5])
    return {
        "l2_norm/moment": moment,
        "l2_norm_ratio/moment_grad": _ratio(gradient, moment),
        "cosine/moment_grad": _ratio(sums[5], gradient * moment),
        "l2_norm/param": value,
        "l2_norm/second_moment_sqrt": math.sqrt(second),
        "l2_norm/update": update,
        "cosine/update_grad": _ratio(sums[6], gradient * update),
        "l2_norm_ratio/update_param": _ratio(update, value),
    }


def _ratio(above: float, under: float) -> float:
    return above / under if under else 0.0
