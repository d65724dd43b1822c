# SPDX-License-Identifier: Apache-2.0
"""Values that ranks give each other by graphs of a few operations, which are functions of Python."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamina import _lamina
from lamina.job import current
from lamina.tensorflow import running
from lamina.tensorflow.installed import OPERATORS, tf

Value = tuple[int, int]  # an operation, and its output


class Turns:
    """A variable that steps and exchanges write. So TensorFlow runs them one after the other, in the order of the
    program, where they are parts of one function."""

    def __init__(self):
        self._variable = tf.Variable(0, trainable=False, name="lamina_turns")

    def begin(self, **attributes: Any) -> tf.Tensor:
        """Begins one: `SMPBegin` with these inputs and attributes."""
        plain = {"arguments": [], "names": [], "microbatches": 1, "backward": False}
        with tf.control_dependencies([self._variable.assign_add(0, read_value=False)]):
            return OPERATORS.smp_begin(**plain | attributes)


@dataclass
class Operation:
    """One of a graph.

    Attributes:
        rank: which rank of the group runs it.
        inputs: values that it reads.
        outputs: types of what it makes.
    """

    rank: int
    inputs: list[Value]
    outputs: list[tf.DType]


class SmallGraph:
    """A graph of a few operations over the ranks of a group: "partitions" of one copy of the model, or "same_parts",
    those that have the same part in all copies.

    Attributes:
        number: that it has in its group.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        results: Sequence[Value],
        title: str,
        words: Sequence[str],
        group: str,
    ):
        """Adds it; all ranks of the group add the same.

        Args:
            operations: in an order in which each follows what it reads.
            results: what all ranks get.
            title: what it is, for errors.
            words: what the operations make, for errors.
            group: the group's name.
        """
        session = current.session()
        self._operations, self._copies = operations, group == "same_parts"
        ranks = session.group_members(group)
        cut = _lamina.cut_graph(
            [each.rank for each in operations],
            [each.inputs for each in operations],
            [[] for _ in operations],
            [[False] * len(each.outputs) for each in operations],
            list(results),
            len(ranks),
        )
        self.number = _lamina.add_graph(session, cut, list(results), list(words), title, self._copies)
        own = ranks.index(session.rank)
        self._segments = [
            (
                [(operation, output) for operation, output, _, reader, _ in cut.crossings if reader == at],
                members,
                [(operation, output) for operation, output, maker, _, _ in cut.crossings if maker == at],
            )
            for at, (rank, _, members) in enumerate(cut.segments)
            if rank == own
        ]

    def begin(self) -> tf.Tensor:
        """Begins a step of it alone. Returns the token that begins its way."""
        return turns().begin(**{"copies" if self._copies else "graph": self.number})

    def end(self, token: tf.Tensor) -> None:
        """Ends that step."""
        with tf.control_dependencies([token]):
            OPERATORS.smp_end(one_copy=not self._copies, copies=self._copies)

    def put(
        self, token: tf.Tensor, compute: Callable[[int, list[tf.Tensor]], Sequence[tf.Tensor]]
    ) -> tuple[tf.Tensor, dict[Value, tf.Tensor]]:
        """Puts this rank's part into the graph that is made, in a step.

        Args:
            token: begins its way.
            compute: makes the outputs of an operation, by number, of its inputs.

        Returns:
            The token that is there once all results are, and what this rank has made or got.
        """
        values: dict[Value, tf.Tensor] = {}
        for at, (receives, members, sends) in enumerate(self._segments):
            place = {"graph": self.number, "segment": at, "microbatch": 0, "backward": False, "copies": self._copies}
            entered = OPERATORS.smp_input(
                token=token,
                passed=[],
                gradients=[False] * len(receives),
                Treceived=[self._operations[operation].outputs[output] for operation, output in receives],
                shapes=[tf.TensorShape(None)] * len(receives),
                **place,
            )
            running.run_freely(entered.next.op)
            token = entered.next
            values.update(zip(receives, entered.received, strict=True))
            if not members:  # what follows
                break
            for operation in members:
                made = compute(operation, [values[each] for each in self._operations[operation].inputs])
                values.update({(operation, output): tensor for output, tensor in enumerate(made)})
            left = OPERATORS.smp_output(
                token=token,
                sent=[values[each] for each in sends],
                passed=[],
                gradients=[False] * len(sends),
                **place,
            )
            running.run_freely(left.next.op)
            token = left.next
        return token, values


class Exchange:
    """A graph in which each rank makes one tensor, and has those of all."""

    def __init__(self, dtype: tf.DType, title: str, group: str = "partitions"):
        session = current.session()
        ranks = session.group_members(group)
        self.own, self.count = ranks.index(session.rank), len(ranks)
        if self.count == 1:
            return
        every = range(self.count)
        self._graph = SmallGraph(
            [Operation(rank, [], [dtype]) for rank in every],
            [(rank, 0) for rank in every],
            title,
            ["its part"] * self.count,
            group,
        )
        self._run = tf.function(self._gather, input_signature=[tf.TensorSpec(None, dtype)], autograph=False)

    def gathered(self, tensor: Any) -> list[tf.Tensor]:
        """The tensors of all ranks, in their order. Collective."""
        return [tensor] if self.count == 1 else self._run(tensor)

    def _gather(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        token, values = self._graph.put(self._graph.begin(), lambda *_: [tensor])
        self._graph.end(token)
        return [values[rank, 0] for rank in range(self.count)]


class Words(Exchange):
    """One of words that JSON has."""

    def __init__(self, title: str, group: str = "partitions"):
        super().__init__(tf.uint8, title, group)

    def of_all(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """The words of all ranks, in their order. Collective."""
        sent = tf.constant(np.frombuffer(json.dumps(own).encode(), np.uint8))
        return [json.loads(each.numpy().tobytes()) for each in self.gathered(sent)]


class Exchanges:
    """The exchanges of a job between the ranks of one copy."""

    def __init__(self):
        turns()
        self._words = Words("a comparison of traced calls")
        self._numbers = Exchange(tf.float64, "a sum over ranks")

    @property
    def alone(self) -> bool:
        """There is one rank."""
        return self._numbers.count == 1

    def words(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """The words of all ranks, in their order. Collective."""
        return self._words.of_all(own)

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
