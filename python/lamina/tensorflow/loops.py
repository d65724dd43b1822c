# SPDX-License-Identifier: Apache-2.0
"""Places in which the loops of Keras 2 and of Keras 3 differ: `LOOP` is that of the Keras there is."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.python.ops import resource_variable_ops

from lamina.tensorflow.installed import OF_KERAS_2, keras, tf

if OF_KERAS_2:
    from tf_keras.src.utils import losses_utils
else:
    from keras.src.losses import loss as of_losses

_MEANS = ("sum_over_batch_size", "mean")
_CHANGES = ("assign", "assign_add", "assign_sub")

# Takes a loss's values, what a mask leaves of them, and its reduction: "mean", "sum", or Keras's word for another one.
# Returns what the loss is to be multiplied with; None for nothing.
Note = Callable[[Any, Any, str], Any]


@contextlib.contextmanager
def _replaced(place: Any, **functions: Any) -> Iterator[None]:
    plain = {name: getattr(place, name) for name in functions}
    for name, function in functions.items():
        setattr(place, name, function)
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(place, name, function)


def _kinds(kind: type) -> Iterator[type]:
    """A class and all that are of it."""
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


class OfKeras3:
    """The loop of Keras 3."""

    def called(self, model: keras.Model, x: Any, training: bool) -> Any:
        """The model's results."""
        return model(x, training=training) if model._call_has_training_arg else model(x)

    def loss(self, model: keras.Model, *data: Any, training: bool) -> tf.Tensor:
        """The loss of results: of x, y, them, and weights of samples."""
        return model._compute_loss(*data, training=training)

    def count_loss(self, model: keras.Model, *data: Any, rows: Any, training: bool) -> None:
        """Updates the metrics that losses are."""
        model._loss_tracker.update_state(self.loss(model, *data, training=training), sample_weight=rows)

    def without_metrics(self) -> contextlib.AbstractContextManager:
        """Has metrics stay as they are."""
        return keras.StatelessScope()

    def noting(self, note: Note) -> contextlib.AbstractContextManager:
        """Calls `note` for each loss that is computed."""
        plain = of_losses.reduce_weighted_values

        def noted(values: Any, sample_weight: Any = None, mask: Any = None, reduction: Any = None, dtype: Any = None):
            means = reduction in _MEANS or (reduction == "mean_with_sample_weight" and sample_weight is mask is None)
            factor = note(values, mask, "mean" if means else reduction)
            loss = plain(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
            return loss if factor is None else loss * tf.cast(factor, loss.dtype)

        return _replaced(of_losses, reduce_weighted_values=noted)

    def scaled(self, optimizer: Any, loss: tf.Tensor) -> tf.Tensor:
        """A loss by the scale that an optimizer has for it."""
        return optimizer.scale_loss(loss)

    def apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Steps by gradients of a scaled loss."""
        optimizer.apply_gradients(zip(gradients, variables, strict=True))


class OfKeras2:
    """The loop of Keras 2, as `OfKeras3`."""

    def called(self, model: keras.Model, x: Any, training: bool) -> Any:
        return model(x, training=training)

    def loss(self, model: keras.Model, x: Any, y: Any, results: Any, sample_weight: Any, training: bool) -> tf.Tensor:
        loss = model.compute_loss(x, y, results, sample_weight)
        if training:
            model._validate_target_and_loss(y, loss)
        return loss

    def count_loss(self, model: keras.Model, *data: Any, rows: Any, training: bool) -> None:
        self.loss(model, *data, training=training)  # which counts it

    def without_metrics(self) -> contextlib.AbstractContextManager:
        @tf.autograph.experimental.do_not_convert
        def kept(variable: tf.Variable, *_: Any, **__: Any) -> tf.Tensor:
            return variable.read_value()

        stack = contextlib.ExitStack()
        for kind in _kinds(resource_variable_ops.BaseResourceVariable):
            stack.enter_context(_replaced(kind, **{name: kept for name in _CHANGES if name in vars(kind)}))
        return stack

    def noting(self, note: Note) -> contextlib.AbstractContextManager:
        def noted(values: Any, weights: Any, mask: Any, reduction: str) -> Any:
            means = reduction in ("auto", *_MEANS)
            # Gradients of several numbers are those of their sum.
            factor = note(values, mask, "mean" if means else "sum")
            if mask is not None and means:
                # A mask may leave nothing of a part, whose mean Keras would divide by zero.
                mask = tf.cast(mask, values.dtype)
                mask *= tf.math.divide_no_nan(tf.cast(tf.size(mask), mask.dtype), tf.reduce_sum(mask))
            weights = losses_utils.apply_mask(values, weights, mask)
            if factor is None:
                return weights
            return factor if weights is None else weights * tf.cast(factor, weights.dtype)

        return _replaced(losses_utils, apply_valid_mask=noted)

    def scaled(self, optimizer: Any, loss: tf.Tensor) -> tf.Tensor:
        return optimizer.get_scaled_loss(loss) if _scales(optimizer) else loss

    def apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        if _scales(optimizer):
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))


def _scales(optimizer: Any) -> bool:
    return hasattr(optimizer, "get_scaled_loss")


LOOP = OfKeras2() if OF_KERAS_2 else OfKeras3()
