# SPDX-License-Identifier: Apache-2.0
"""Optimizers: torch's and others with the engine's update, and those of a model that is cut."""

from lamina.optim.distributed_optimizer import DistributedOptimizer
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
from lamina.optim.registry import register_functional_optimizer

__all__ = [
    "LAMB",
    "QHM",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "DistributedOptimizer",
    "NAdam",
    "NovoGrad",
    "RAdam",
    "RMSprop",
    "Rprop",
    "register_functional_optimizer",
]
