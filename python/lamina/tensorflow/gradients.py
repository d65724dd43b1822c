# SPDX-License-Identifier: Apache-2.0
"""Gradients over the border: that of each operator is the other one."""

from tensorflow.python.framework import ops

from lamina.errors import UsageError
from lamina.tensorflow import graphs, running
from lamina.tensorflow.installed import OPERATORS, tf


def _place(operator: tf.Operation) -> dict:
    if operator.get_attr("backward"):
        raise UsageError("second derivatives of a model that is cut over ranks are not there yet")
    return {name: operator.get_attr(name) for name in ("graph", "segment", "microbatch")} | {"backward": True}


def _dense(gradient: tf.Tensor | tf.IndexedSlices | None, like: tf.Tensor) -> tf.Tensor:
    return tf.zeros_like(like) if gradient is None else tf.convert_to_tensor(gradient)


def noting(trace: running.StepTrace, number: int, result: tf.Tensor) -> tf.Tensor:
    """A result of the model, whose number `trace.reached` has once a gradient comes to it: TensorFlow hands zeros to
    whatever has another output with a gradient."""

    @tf.custom_gradient
    def note(tensor: tf.Tensor):
        def gradient(upstream):
            trace.reached.add(number)
            return upstream

        return tf.identity(tensor), gradient

    return note(result)


@ops.RegisterGradient("SMPInput")
def _gradient_of_input(operator: tf.Operation, token: tf.Tensor, *gradients: tf.Tensor) -> list:
    """Sends the gradients of what came from other ranks to them."""
    trace = running.current("a gradient of a model that is cut over ranks")
    flags = operator.get_attr("gradients")
    count = len(flags)
    outputs = operator.outputs[1 : 1 + count]
    sent = [_dense(gradient, like) for gradient, like, flag in zip(gradients, outputs, flags, strict=False) if flag]
    passed = [
        (at, _dense(gradient, like))
        for at, (gradient, like) in enumerate(zip(gradients[count:], operator.outputs[1 + count :], strict=True))
        if graphs.has_gradients(like)
    ]
    place = _place(operator)
    token = _dense(token, operator.outputs[0])
    running.run_freely(token.op)
    # A tape hands zeros where nothing else leads back: the way back begins behind the way there, and behind the loss.
    known = [gradient for gradient in gradients if tf.is_tensor(gradient)]
    with tf.control_dependencies([operator.outputs[0], *known]):
        token = tf.identity(token)
    result = OPERATORS.smp_output(
        token=token, sent=sent, passed=[gradient for _, gradient in passed], gradients=[], **place
    )
    running.run_freely(result.next.op)
    if place["segment"] == len(trace.call.segments):
        trace.begun += 1
    if place["segment"] == 0:
        trace.ends.append(result.next)
        trace.ended += 1
    back = dict(zip((at for at, _ in passed), result.passed_on, strict=True))
    return [result.next, *(back.get(at) for at in range(len(operator.inputs) - 1))]


@ops.RegisterGradient("SMPOutput")
def _gradient_of_output(operator: tf.Operation, token: tf.Tensor, *_: tf.Tensor) -> list:
    """Gets the gradients of what was sent to other ranks from them."""
    flags = operator.get_attr("gradients")
    sent = [tensor for tensor, flag in zip(operator.inputs[1:], flags, strict=True) if flag]
    result = OPERATORS.smp_input(
        token=token,
        passed=[],
        gradients=[],
        Treceived=[tensor.dtype for tensor in sent],
        shapes=[tensor.shape for tensor in sent],
        **_place(operator),
    )
    running.run_freely(result.next.op)
    received = iter(result.received)
    return [result.next, *(next(received) if flag else None for flag in flags)]
