# SPDX-License-Identifier: Apache-2.0
"""Spreads a Keras model on TensorFlow over several ranks.

    import lamina.tensorflow as smp

    smp.init(partitions=2, microbatches=4)

    class Model(smp.DistributedModel):
        def call(self, x, training=None): ...

    @smp.step
    def train_step(x, y):
        loss = loss_of(y, model(x, training=True))
        return loss, optimizer.get_gradients(loss, model.trainable_variables)

    loss, gradients = train_step(x, y)
    optimizer.apply_gradients(zip([g.accumulate() for g in gradients], model.trainable_variables))

Every rank of the job gives the same arguments. What is not there yet raises an error that says so.
"""

from typing import Any

from lamina.job.current import is_initialized
from lamina.job.lifetime import shutdown
from lamina.job.ranks import MP_GROUP, PP_GROUP, WORLD, CommGroup, RankType
from lamina.tensorflow import core, planned, utils  # noqa: F401 -- `lamina plan` is told of our models
from lamina.tensorflow.beginning import init
from lamina.tensorflow.checkpoints import CheckpointManager
from lamina.tensorflow.core import *  # noqa: F403 -- its names are ours, too
from lamina.tensorflow.fitting import DistributedModel
from lamina.tensorflow.hooks import register_post_partition_hook
from lamina.tensorflow.step import StepOutput, step
from lamina.tensorflow.traced import partition

_MISSING = ("save", "load")


def __getattr__(name: str) -> Any:
    if name in _MISSING:
        raise AttributeError(f"lamina.tensorflow has no {name} yet: see item 7 of docs/roadmap.md")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "MP_GROUP",
    "PP_GROUP",
    "WORLD",
    "CheckpointManager",
    "CommGroup",
    "DistributedModel",
    "RankType",
    "StepOutput",
    "core",
    "init",
    "is_initialized",
    "partition",
    "register_post_partition_hook",
    "shutdown",
    "step",
    "utils",
    *core.__all__,
]
