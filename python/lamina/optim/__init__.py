# SPDX-License-Identifier: Apache-2.0
"""Optimizers: torch's and others with the engine's update, and those of a model that is cut."""

from lamina.errors import UsageError
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
from lamina.optim.registry import functional_forms, register_functional_optimizer

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


class DistributedOptimizer:
    """An optimizer over remote parameters, not available yet. The optimizer of a model that is cut is
    `lamina.DistributedOptimizer(optimizer)`."""

    functional_optim_map = functional_forms()  # by optimizer class, see [Note: functional forms] in registry.py

    def __init__(self, *_: object, **__: object):
        raise UsageError(
            "lamina.optim.DistributedOptimizer, over remote parameters, is not available yet; the optimizer of a model "
            "that is cut is lamina.DistributedOptimizer(optimizer)"
        )
