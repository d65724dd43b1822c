# SPDX-License-Identifier: Apache-2.0
"""The step function whose body TensorFlow traces."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lamina import _lamina
from lamina.errors import UsageError
from lamina.job import current as job
from lamina.tensorflow.installed import tf


@dataclass
class StepTrace:
    """A step function while its body is traced, for one microbatch.

    Attributes:
        wanted: results of the model, by number, whose gradients its body takes; None where that is not known yet.
        graph: the body's; None before it is traced.
        token: the scalar that begins the way of the microbatch.
        call: the model's graph that it goes through; None before the model is called.
        losses: those that the model's layers have added.
        metrics: values that layers of Keras 2 have added for metrics, see `older_keras.count`.
        reached: the results to which gradients have come.
        ends: tensors that are there once the microbatch is through, forward or back.
        begun, ended: ways back that have begun behind the model, and come to its begin.
    """

    wanted: frozenset[int] | None
    graph: tf.Graph | None = None
    token: tf.Tensor | None = None
    call: Any = None
    losses: list[tf.Tensor] | None = None
    metrics: dict[str, tf.Tensor] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    ends: list[tf.Tensor] = field(default_factory=list)
    begun: int = 0
    ended: int = 0

    def enter(self, call: Any) -> tf.Tensor:
        """Has the microbatch go through a graph. Returns the token that begins its way."""
        if self.call is not None:
            raise UsageError("a step function calls its model once, and this one does it twice")
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise UsageError(
                "the model is called in a loop, a conditional or a tf.function of the step function: call it in the "
                "step function's own body"
            )
        self.call = call
        return self.token

    def check(self) -> None:
        """Raises UsageError where the body takes gradients that go through no cut model."""
        times = max(self.begun, self.ended)
        if times > 1:
            raise UsageError(
                f"a step function takes gradients of its model {times} times (second derivatives, which are not there "
                "yet, do so, too): take those of one loss, once, by all of the model's trainable_variables"
            )
        if self.begun != self.ended:
            raise UsageError(
                "gradients of a part of the model: a step function takes them by the model's trainable_variables, so "
                "that they lead through all of it"
            )

    @property
    def backward(self) -> bool:
        """The microbatch goes back."""
        return self.ended > 0


_traces: list[StepTrace] = []


@contextlib.contextmanager
def tracing(trace: StepTrace) -> Iterator[None]:
    """Makes it the one that `current` gives."""
    _traces.append(trace)
    try:
        yield
    finally:
        _traces.pop()


def inside() -> bool:
    """The body of a step function is traced."""
    return bool(_traces)


def current(what: str) -> StepTrace:
    """The step function that is traced. Raises UsageError where there is none, and `what` needs one."""
    if not _traces:
        raise UsageError(f"{what} outside a step: call it in a function that is decorated with smp.step")
    return _traces[-1]


@contextlib.contextmanager
def telling_others(what: str) -> Iterator[None]:
    """Has the other ranks hear of an error: they enter the next step, and this one does not."""
    try:
        yield
    except tf.errors.OpError:  # of a step, which has ended on all
        raise
    except BaseException as error:
        _lamina.abandon_graph_step(job.session(), f"{what}: {type(error).__name__}: {error}")
        raise


def run_freely(operation: tf.Operation) -> None:
    """Takes an operation out of the order that TensorFlow gives operations with state: tokens order ours."""
    graph = operation.graph
    if graph.experimental_acd_manager is not None:
        graph.experimental_acd_manager.run_independently(operation)
