# SPDX-License-Identifier: Apache-2.0
"""Optimizers: torch's and others with the engine's update, and those of a model that is cut."""

from lamina.optim.functional import (
    LAMB,
    QHM,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    NovoGrad,
    RAdam,
    RMSprop,
    Rprop,
)

__all__ = [
    "LAMB",
    "QHM",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "NovoGrad",
    "RAdam",
    "RMSprop",
    "Rprop",
]


def __getattr__(name: str) -> object:
    if name == "DistributedOptimizer":
        raise AttributeError(
            "lamina.optim.DistributedOptimizer, over remote parameters, is not available yet; the optimizer of a model "
            "that is cut is lamina.DistributedOptimizer(optimizer)"
        )
    raise AttributeError(f"lamina.optim has no {name!r}")
