# SPDX-License-Identifier: Apache-2.0
"""Numbers of all gradients of a model whose variables are spread over ranks: global norms, and loss scales' question
for finite ones. TensorFlow's and Keras's own functions give them, where there is a job."""

from collections.abc import Callable, Sequence
from typing import Any

from tensorflow.python.framework import smart_cond
from tensorflow.python.ops import clip_ops

from lamina.errors import UsageError
from lamina.job.current import is_initialized
from lamina.tensorflow import exchange, running
from lamina.tensorflow.installed import OF_KERAS_2, keras, tf

if OF_KERAS_2:
    from tf_keras.src.mixed_precision import loss_scale_optimizer
else:
    from keras.src.optimizers import base_optimizer


def _is_spread() -> bool:
    return is_initialized() and not exchange.of_job().alone


def _of_ranks(what: str) -> bool:
    """Gradients are spread over ranks. Raises UsageError in a step function, where microbatches have parts of them."""
    if not _is_spread():
        return False
    if running.inside():
        raise UsageError(
            f"{what} in a step function, of a microbatch's gradients: take it of what accumulate() gives, outside"
        )
    return True


def _global_norm(plain: Callable[..., Any]) -> Callable[..., Any]:
    def global_norm(t_list: Sequence[Any], *arguments: Any, **keywords: Any) -> Any:
        if not _of_ranks("a global norm"):
            return plain(t_list, *arguments, **keywords)
        own = [each for each in t_list if each is not None]
        norm = plain(own, *arguments, **keywords) if own else tf.constant(0, keras.backend.floatx())
        return tf.cast(exchange.of_job().norm(norm), norm.dtype)

    return global_norm


def _finite(plain: Callable[..., Any]) -> Callable[..., Any]:
    def all_finite(grads: Sequence[Any]) -> Any:
        own = [each for each in grads if each is not None]
        if not _of_ranks("a check for finite gradients"):
            return plain(own)
        return exchange.of_job().all(plain(own) if own else tf.constant(True))

    return all_finite


def _apply_scaled_in_keras_2(plain: Callable[..., Any]) -> Callable[..., Any]:
    def apply_gradients(optimizer: Any, grads_and_vars: Any, *arguments: Any, **keywords: Any) -> Any:
        pairs = list(grads_and_vars)
        if _is_spread() and all(gradient is None for gradient, _ in pairs):
            # A rank whose variables have no gradients takes part in the check and the norms of the others.
            inner = optimizer.inner_optimizer
            applied = optimizer._loss_scale.update(())[1] if optimizer.dynamic else True
            return smart_cond.smart_cond(
                applied, lambda: inner.apply_gradients(()), lambda: inner.iterations.assign_add(1)
            )
        return plain(optimizer, pairs, *arguments, **keywords)

    return apply_gradients


def _apply_in_keras_2(plain: Callable[..., Any]) -> Callable[..., Any]:
    def apply_gradients(optimizer: Any, grads_and_vars: Any, *arguments: Any, **keywords: Any) -> Any:
        pairs = list(grads_and_vars)
        if _is_spread() and all(gradient is None for gradient, _ in pairs):
            # A rank whose variables have no gradients takes part in the norms of the others.
            if optimizer.global_clipnorm:
                clip_ops.global_norm(())
            optimizer.iterations.assign_add(1)
            return optimizer.iterations
        return plain(optimizer, pairs, *arguments, **keywords)

    return apply_gradients


def _check_finite(plain: Callable[..., Any]) -> Callable[..., Any]:
    def check_finite(optimizer: Any, grads: Sequence[Any]) -> Any:
        return _finite(lambda own: plain(optimizer, own))(grads)

    return check_finite


def _apply(plain: Callable[..., Any]) -> Callable[..., Any]:
    def apply(optimizer: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        grads = list(grads)
        if _is_spread() and all(each is None for each in grads):
            # A rank whose variables have no gradients takes part in the norms of the others.
            if optimizer.global_clipnorm:
                base_optimizer.global_norm(())
            optimizer.iterations.assign_add(1)
            return None
        return plain(optimizer, grads, trainable_variables)

    return apply


def _apply_gradients(plain: Callable[..., Any]) -> Callable[..., Any]:
    def apply_gradients(optimizer: Any, grads_and_vars: Any) -> Any:
        pairs = list(grads_and_vars)
        if pairs or not _is_spread():
            return plain(optimizer, pairs)
        optimizer.apply([], [])  # this rank has none of the model's variables
        return optimizer.iterations

    return apply_gradients


def optimizers() -> list[type]:
    """The classes that all optimizers of Keras are of."""
    return [keras.optimizers.Optimizer, *([keras.optimizers.legacy.Optimizer] if OF_KERAS_2 else [])]


def spread() -> None:
    """Has them count the gradients of all ranks. Once."""
    if hasattr(clip_ops.global_norm, "_lamina"):
        return
    clip_ops.global_norm = tf.linalg.global_norm = _global_norm(clip_ops.global_norm)
    clip_ops.global_norm._lamina = True
    if OF_KERAS_2:
        loss_scale_optimizer._is_all_finite = _finite(loss_scale_optimizer._is_all_finite)
        scaled = loss_scale_optimizer.LossScaleOptimizerV3
        scaled.apply_gradients = _apply_scaled_in_keras_2(scaled.apply_gradients)
        for kind in optimizers():
            kind.apply_gradients = _apply_in_keras_2(kind.apply_gradients)
        return
    base_optimizer.global_norm = _global_norm(base_optimizer.global_norm)
    scale = keras.optimizers.LossScaleOptimizer
    scale.check_finite = _check_finite(scale.check_finite)
    base = base_optimizer.BaseOptimizer
    base.apply = _apply(base.apply)
    base.apply_gradients = _apply_gradients(base.apply_gradients)
