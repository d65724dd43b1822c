# SPDX-License-Identifier: Apache-2.0
"""Values that all ranks give each other between their steps, by the same operators."""

import json
import math
from typing import Any

import numpy as np

from lamina import _lamina
from lamina.job import current
from lamina.tensorflow.installed import OPERATORS, tf


class Turns:
    """A variable that steps and exchanges write. So TensorFlow runs them one after the other, in the order of the
    program, where they are parts of one function."""

    def __init__(self):
        self._variable = tf.Variable(0, trainable=False, name="lamina_turns")

    def begin(self, **attributes: Any) -> tf.Tensor:
        """Begins one: `SMPBegin` with these inputs and attributes."""
        with tf.control_dependencies([self._variable.assign_add(0, read_value=False)]):
            return OPERATORS.smp_begin(**attributes)


class Exchange:
    """A graph in which each rank makes one tensor, and has those of all."""

    def __init__(self, dtype: tf.DType, title: str):
        session = current.session()
        ranks = session.group_members("partitions")
        self.own, self.count = ranks.index(session.rank), len(ranks)
        if self.count == 1:
            return
        every = range(self.count)
        results = [(operation, 0) for operation in every]
        nothing: list[list[Any]] = [[] for _ in every]
        cut = _lamina.cut_graph(list(every), nothing, nothing, [[False]] * self.count, results, self.count)
        self._number = _lamina.add_graph(session, cut, results, ["its part"] * self.count, title)
        self._run = tf.function(self._gather, input_signature=[tf.TensorSpec(None, dtype)], autograph=False)

    def gathered(self, tensor: Any) -> list[tf.Tensor]:
        """The tensors of all ranks, in their order. Collective."""
        return [tensor] if self.count == 1 else self._run(tensor)

    def _gather(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        others = self.count - 1
        place = {"graph": self._number, "microbatch": 0, "backward": False}
        token = turns().begin(arguments=[], names=[], graph=self._number, microbatches=1, backward=False)
        entered = OPERATORS.smp_input(token=token, passed=[], segment=0, gradients=[], Treceived=[], shapes=[], **place)
        left = OPERATORS.smp_output(
            token=entered.next, sent=[tensor] * others, passed=[], segment=0, gradients=[False] * others, **place
        )
        came = OPERATORS.smp_input(
            token=left.next,
            passed=[],
            segment=1,
            gradients=[False] * others,
            Treceived=[tensor.dtype] * others,
            shapes=[tf.TensorShape(None)] * others,
            **place,
        )
        received = list(came.received)
        with tf.control_dependencies([came.next]):
            OPERATORS.smp_end()
        return [*received[: self.own], tensor, *received[self.own :]]


class Exchanges:
    """The exchanges of a job."""

    def __init__(self):
        turns()
        self._words = Exchange(tf.uint8, "a comparison of traced calls")
        self._numbers = Exchange(tf.float64, "a sum over ranks")

    @property
    def alone(self) -> bool:
        """There is one rank."""
        return self._numbers.count == 1

    def words(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """The words of all ranks, in their order. Collective."""
        sent = tf.constant(np.frombuffer(json.dumps(own).encode(), np.uint8))
        return [json.loads(each.numpy().tobytes()) for each in self._words.gathered(sent)]

    def norm(self, own: Any) -> tf.Tensor:
        """The Euclidean norm of all ranks' numbers. Collective."""
        parts = self._numbers.gathered(tf.stop_gradient(tf.cast(own, tf.float64)))
        return tf.sqrt(tf.add_n([part * part for part in parts]))

    def all(self, own: Any) -> tf.Tensor:
        """It is so on all ranks. Collective."""
        parts = self._numbers.gathered(tf.where(own, tf.constant(0, tf.float64), tf.constant(math.inf, tf.float64)))
        return tf.add_n(parts) < math.inf


def turns() -> Turns:
    """The turns of the job there is."""
    return current.job().own(Turns)


def of_job() -> Exchanges:
    """The exchanges of the job there is."""
    return current.job().own(Exchanges)
