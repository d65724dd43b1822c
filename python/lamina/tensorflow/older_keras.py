# SPDX-License-Identifier: Apache-2.0
"""Keras 2, and names of it that scripts use, in Keras 3: they stand there as long as the process, from `init` on."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from lamina.errors import UsageError
from lamina.tensorflow.installed import OF_KERAS_2, keras, tf


def variables(model: keras.Model) -> list[Any]:
    """Variables of a model of Keras 2, with the states that its layers draw of, and without those of its metrics."""
    layers = list(model._flatten_layers())
    generators = [getattr(getattr(each, "_random_generator", None), "_generator", None) for each in layers]
    counts = {id(variable) for layer in layers for metric in layer._metrics for variable in metric.variables}
    own = [each for each in keras.Model.weights.fget(model) if id(each) not in counts]
    return [*own, *(each.state for each in generators if each is not None)]


@contextlib.contextmanager
def taking_metrics(model: keras.Model) -> Iterator[Callable[[], dict[str, tf.Tensor]]]:
    """Gives what layers of Keras 2 hand to `add_metric` in a call, for `count`, which counts it behind the call."""
    plain, added = keras.layers.Layer.add_metric, []

    @tf.autograph.experimental.do_not_convert
    def add_metric(layer: keras.layers.Layer, value: tf.Tensor, name: str | None = None, **keywords: Any) -> None:
        if hasattr(value, "_metric_obj"):
            raise UsageError(
                f"add_metric() of what metric {value._metric_obj.name} gives, in the call of a DistributedModel: give "
                "it the tensor and a name, and Keras takes its mean"
            )
        if name is None:
            plain(layer, value, name, **keywords)  # which says that it needs one
        added.append((layer, name, value))

    def by_layers() -> dict[str, tf.Tensor]:
        numbers = {id(layer): number for number, layer in enumerate(model._flatten_layers())}
        return {f"{at} {numbers[id(layer)]} {name}": value for at, (layer, name, value) in enumerate(added)}

    keras.layers.Layer.add_metric = add_metric
    try:
        yield by_layers
    finally:
        keras.layers.Layer.add_metric = plain


def count(model: keras.Model, values: dict[str, tf.Tensor]) -> None:
    """Has the metrics that layers have added count these values."""
    layers = list(model._flatten_layers())
    for key, value in values.items():
        _, number, name = key.split(" ", 2)
        layer = layers[int(number)]
        metric = layer._get_existing_metric(name)
        if metric is None:
            metric = keras.metrics.Mean(name=name, dtype=value.dtype)
            layer._metrics.append(metric)
        metric(value)


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
