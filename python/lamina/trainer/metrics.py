# SPDX-License-Identifier: Apache-2.0
"""Metrics of torchmetrics over all copies of the model."""

import copy
from typing import Any

import torch

from lamina.errors import ConfigError
from lamina.job.ranks import device, size
from lamina.trainer import measured
from lamina.trainer.moves import moved
from lamina.trainer.ranks import of_each_copy
from lamina.util import pytree


def fresh(metrics: dict[str, Any]) -> dict[str, Any]:
    """Copies that have seen nothing, and that no process of torch's synchronises, in such a dictionary as these are in.

    Errors:
        ConfigError: one is no metric.
    """
    for name, metric in metrics.items():
        if not hasattr(metric, "_reductions"):
            raise ConfigError(
                f"get_metrics() has a {type(metric).__name__} as {name!r}: its values are metrics of torchmetrics. "
                "Those of a MetricCollection have names of their own: return {**collection}, or the collection itself"
            )
    copies = type(metrics)({name: copy.deepcopy(metric) for name, metric in metrics.items()})
    for metric in copies.values():
        metric.reset()
        metric.distributed_available_fn = _alone
    put_on_device(copies)
    return copies


def put_on_device(metrics: dict[str, Any]) -> None:
    """Has metrics add up where the rank computes."""
    for metric in metrics.values():
        metric.to(device())


def computed(metrics: dict[str, Any]) -> dict[str, Any]:
    """The values over what all copies of the model have seen; each of them calls this, and the metrics become those of
    all. Numbers are as `measured.unread` has them."""
    own = {name: (metric._update_count, _states(metric)) for name, metric in metrics.items()}
    everyone = of_each_copy(own)
    values = {}
    for name, metric in metrics.items():
        seen = [of_copy[name] for of_copy in everyone if of_copy[name][0]]
        if seen:
            _join(metric, [states for _, states in seen])
            metric._update_count = sum(count for count, _ in seen)
        metric._computed = None
        values[name] = measured.unread(metric.compute())
    return values


def _states(metric: Any) -> dict[str, Any]:
    """The states of a metric, as they go to other ranks: on the host."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    return states if size() == 1 else pytree.map_tensors(torch.Tensor.cpu, states)


def _join(metric: Any, copies: list[dict[str, Any]]) -> None:
    """Has the metric become that of several."""
    for name, reduce in metric._reductions.items():
        of_copies = [moved(states[name], metric.device) for states in copies]
        if isinstance(of_copies[0], list):
            setattr(metric, name, [item for items in of_copies for item in items])
        elif len(of_copies) == 1:  # perhaps another rank's
            setattr(metric, name, of_copies[0])
        elif getattr(reduce, "__name__", "") == "dim_zero_cat":  # of tensors that copies may have more of than others
            setattr(metric, name, torch.cat([state.reshape(-1) if not state.dim() else state for state in of_copies]))
        else:
            stacked = torch.stack(of_copies)
            setattr(metric, name, stacked if reduce is None else reduce(stacked))


def _alone() -> bool:
    """Says, in the place of torch, that there are no other processes: `computed` has asked them."""
    return False
