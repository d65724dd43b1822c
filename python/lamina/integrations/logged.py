# SPDX-License-Identifier: Apache-2.0
"""Values that microbatches log, as the log of their batch."""

import operator
from typing import Any

import torch

from lamina.trainer.measured import times


class Logged:
    """The logs of one microbatch.

    Attributes:
        samples: how many it has.
        values: of each log its value (a number, on a device a tensor), the dtype of that, and the other arguments.
    """

    def __init__(self, samples: int, logs: list[tuple[dict[str, Any], torch.Tensor]]):
        self.samples = samples
        self.values = [(times(value, 1), value.dtype, arguments) for arguments, value in logs]


def over_microbatches(logged: list[Logged]) -> list[dict[str, Any]]:
    """The arguments of the logs of a batch, one for each name. Over microbatches values are reduced as over steps: to
    their mean over the samples, their sum, minimum or maximum."""
    by_name: dict[str, list[tuple]] = {}
    for each in logged:
        for value in each.values:
            by_name.setdefault(value[-1]["name"], []).append((each.samples, *value))
    return [_reduced(*zip(*found, strict=True)) for found in by_name.values()]


def _reduced(
    samples: tuple[int, ...],
    values: tuple[float | torch.Tensor, ...],
    dtypes: tuple[torch.dtype, ...],
    logs: tuple[dict[str, Any], ...],
) -> dict[str, Any]:
    mean = sum(map(operator.mul, samples, values)) / sum(samples)
    by = logs[0].get("reduce_fx", "mean")
    value = {"sum": sum, "min": _least, "max": _most}.get(getattr(by, "__name__", by), lambda _: mean)(values)
    sizes = [log["batch_size"] for log in logs if log.get("batch_size") is not None]
    dtype = dtypes[0] if dtypes[0].is_floating_point else torch.get_default_dtype()
    return {**logs[0], "value": torch.as_tensor(value, dtype=dtype), "batch_size": sum(sizes) or None}


def _least(values: tuple) -> float | torch.Tensor:
    return torch.stack(values).min() if isinstance(values[0], torch.Tensor) else min(values)


def _most(values: tuple) -> float | torch.Tensor:
    return torch.stack(values).max() if isinstance(values[0], torch.Tensor) else max(values)
