# SPDX-License-Identifier: Apache-2.0
"""Keras 2, and names of it that scripts use, in Keras 3: they stand there as long as the process, from `init` on."""

import os
from typing import Any

from lamina.errors import UsageError
from lamina.tensorflow.installed import OF_KERAS_2, keras, tf
from lamina.tensorflow.model import CutModel


class ModelOfKeras2(CutModel):
    """A model without Keras's own loop, whose layers draw of states that are variables."""

    def _keras_variables(self) -> list[Any]:
        drawing = [layer for layer in self._flatten_layers() if hasattr(layer, "_random_generator")]
        generators = [getattr(layer._random_generator, "_generator", None) for layer in drawing]
        return [*super()._keras_variables(), *(each.state for each in generators if each is not None)]

    def compile(self, *_: Any, **__: Any) -> None:
        raise UsageError("fit() and compile() of a DistributedModel take Keras 3: write the loop with smp.step")


class _Called(list):
    """A list that may be called, as `optimizer.variables()`."""

    def __call__(self) -> list[Any]:
        return self


def add() -> None:
    """Adds what is not there. Once."""
    if OF_KERAS_2:  # a state of a kernel's own would be one of each microbatch
        keras.backend.experimental.enable_tf_random_generator()
        return
    metric = keras.metrics.Metric
    if not hasattr(metric, "reset_states"):
        metric.reset_states = lambda self: self.reset_state()
    for optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        kind = next(each for each in optimizer.__mro__ if "variables" in each.__dict__)
        plain = kind.__dict__["variables"]
        if not hasattr(plain.fget, "_lamina"):
            kind.variables = property(_called(plain))
    plain = keras.models.load_model
    if hasattr(plain, "_lamina"):
        return

    def load_model(filepath: Any, *arguments: Any, **keywords: Any) -> Any:
        """Reads a model; what is a SavedModel, too, as `tf.saved_model.load`."""
        if os.path.isfile(os.path.join(os.fspath(filepath), "saved_model.pb")):
            return tf.saved_model.load(os.fspath(filepath))
        return plain(filepath, *arguments, **keywords)

    load_model._lamina = True
    for module in (keras.models, keras.saving, tf.keras.models):
        module.load_model = load_model


def _called(plain: property) -> Any:
    def variables(optimizer: Any) -> _Called:
        return _Called(plain.fget(optimizer))

    variables._lamina = True
    return variables
