# SPDX-License-Identifier: Apache-2.0
"""Gifts of copies of the model to each other: means of gradients, and values of one of them. Ranks that have the same
part of the model in all copies share graphs for them: see [Note: copies of a model] in lamina/graph/current.h."""

from collections.abc import Callable, Sequence
from typing import Any

from lamina.errors import DesyncError
from lamina.job import current
from lamina.tensorflow import slices
from lamina.tensorflow.exchange import Operation, SmallGraph, Words
from lamina.tensorflow.installed import tf

_GROUP = "same_parts"


class Averaging:
    """A graph that averages tensors and slices over copies, and gives all copies values of the first one.

    Each copy gets a part of all tensors of a type, as one vector, from the others, and sends them the mean of it. So
    all copies have the same bits. Slices go to all as they are.
    """

    def __init__(self, kinds: Sequence[tuple[bool, tf.DType, tf.DType]], first: Sequence[tf.DType], title: str):
        """Adds it; collective over the copies.

        Args:
            kinds: of each that is averaged, whether it is slices, its type, and that of its indices.
            first: types of the values that are those of the first copy.
            title: what it is, for errors.
        """
        self._copies = len(current.session().group_members(_GROUP))
        every = range(self._copies)
        self._types = list(dict.fromkeys(dtype for is_slices, dtype, _ in kinds if not is_slices))
        parts = self._types * self._copies
        whole = [each for is_slices, *types in kinds if is_slices for each in types]
        count = len(self._types)
        makers = [Operation(copy, [], [*parts, *whole, *(first if copy == 0 else ())]) for copy in every]
        adders = [
            Operation(copy, [(maker, copy * count + at) for at in range(count) for maker in every], self._types)
            for copy in every
        ]
        self._sums = [(self._copies + copy, at) for copy in every for at in range(count)]
        self._first_whole = len(parts)
        self._first_value = len(parts) + len(whole)
        self._graph = SmallGraph(
            [*makers, *(adders if count else ())],
            [
                *self._sums,
                *((copy, len(parts) + at) for copy in every for at in range(len(whole))),
                *((0, self._first_value + at) for at in range(len(first))),
            ],
            title,
            ["the gradients"] * self._copies + ["the mean"] * self._copies,
            _GROUP,
        )
        self._values = len(first)
        self.number = self._graph.number
        self.alone = tf.function(self._alone, autograph=False)

    def _alone(self, tensor: Any) -> Any:
        """The mean of what copies have, in a step of its own."""
        token, [mean], _ = self.put(self._graph.begin(), [tensor], [])
        self._graph.end(token)
        return mean

    def put(
        self, token: tf.Tensor, averaged: Sequence[Any], first: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, list[Any], list[tf.Tensor]]:
        """Puts it into the graph that is made, in a step.

        Args:
            token: begins its way.
            averaged: tensors and slices, of the kinds that were said.
            first: this copy's values.

        Returns:
            The token that is there once all copies have all, the means, and the values of the first copy.
        """
        tensors = [each for each in averaged if not _are_slices(each)]
        dense = {dtype: [each for each in tensors if each.dtype == dtype] for dtype in self._types}
        vectors = {dtype: tf.concat([tf.reshape(each, [-1]) for each in own], 0) for dtype, own in dense.items()}
        cut = [tf.split(vector, _sizes(vector, self._copies), num=self._copies) for vector in vectors.values()]
        rows = [part for each in averaged if _are_slices(each) for part in (each.values, each.indices)]
        own_copy = of_job().own
        made = [*(vector[copy] for copy in range(self._copies) for vector in cut), *rows, *(() if own_copy else first)]

        def compute(operation: int, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
            if operation < self._copies:
                return made
            summed = [inputs[at * self._copies : (at + 1) * self._copies] for at in range(len(self._types))]
            return [tf.add_n(parts) / self._copies for parts in summed]

        token, values = self._graph.put(token, compute)
        means = {dtype: iter(self._means(at, dense[dtype], values)) for at, dtype in enumerate(self._types)}
        number = iter(range(self._first_whole, self._first_value, 2))
        results = [
            self._mean_slices(next(number), each, values) if _are_slices(each) else next(means[each.dtype])
            for each in averaged
        ]
        return token, results, [values[0, self._first_value + at] for at in range(self._values)]

    def _means(self, at: int, own: list[tf.Tensor], values: dict[tuple[int, int], tf.Tensor]) -> list[tf.Tensor]:
        count = len(self._types)
        vector = tf.concat([tf.reshape(values[each], [-1]) for each in self._sums[at::count]], 0)
        parts = tf.split(vector, [tf.size(each) for each in own], num=len(own))
        return [_shaped(part, each) for part, each in zip(parts, own, strict=True)]

    def _mean_slices(
        self, number: int, own: tf.IndexedSlices, values: dict[tuple[int, int], tf.Tensor]
    ) -> tf.IndexedSlices:
        shape = tf.TensorShape([None, *own.values.shape[1:]]) if own.values.shape.rank else own.values.shape
        every = [
            tf.IndexedSlices(
                tf.ensure_shape(values[copy, number] / self._copies, shape),
                tf.ensure_shape(values[copy, number + 1], [None]),
                own.dense_shape,
            )
            for copy in range(self._copies)
        ]
        return slices.added(every)


def _are_slices(each: Any) -> bool:
    return isinstance(each, tf.IndexedSlices)


def _sizes(vector: tf.Tensor, parts: int) -> tf.Tensor:
    count = tf.size(vector)
    return tf.fill([parts], count // parts) + tf.cast(tf.range(parts) < count % parts, count.dtype)


def _shaped(vector: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    tensor = tf.reshape(vector, tf.shape(like))
    tensor.set_shape(like.shape)
    return tensor


class Copies:
    """Copies of the job's model.

    Attributes:
        ranks: that have the same part of the model as this one, by copy.
        own: the number of this rank's copy.
        count: how many there are.
    """

    def __init__(self):
        session = current.session()
        self.ranks: list[int] = session.group_members(_GROUP)
        self.own = self.ranks.index(session.rank)
        self.count = len(self.ranks)
        self._words = Words("a comparison of copies of the model", _GROUP)
        self._graphs: dict[tuple, Any] = {}

    def require_same(self, own: dict[str, str], words: Callable[[str, str | None, str | None], str]) -> None:
        """Raises DesyncError where copies have said other things than this one. Collective.

        Args:
            own: things and what is said of them.
            words: begins the error: of a thing, what is said here and by the other, None where nothing is.
        """
        if self.count == 1:
            return
        with tf.init_scope():
            every = [each["same"] for each in self._words.of_all({"same": own})]
        mine = self.ranks[self.own]
        for rank, theirs in zip(self.ranks, every, strict=True):
            for name in [*own, *(each for each in theirs if each not in own)]:
                if own.get(name) != theirs.get(name):
                    raise DesyncError(
                        f"copies of the model differ: on ranks {mine} and {rank} "
                        f"{words(name, own.get(name), theirs.get(name))}"
                    )

    def words(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Words of the ranks with the same part of the model, by copy. Collective."""
        return [own] if self.count == 1 else self._words.of_all(own)

    def averaging(self, what: str, gradients: dict[int, Any], first: Sequence[tf.Variable]) -> Averaging:
        """The graph that averages gradients of this kind. Collective the first time.

        Args:
            what: a step function, for errors.
            gradients: by their numbers among the results of that function.
            first: variables that get the values of the first copy.
        """
        said = {f"result {number} of {what}": _text(each) for number, each in gradients.items()}
        types = [variable.dtype for variable in first]
        kinds = [_kind(each) for each in gradients.values()]
        return self._graph(said, (*types,), lambda: Averaging(kinds, types, f"the mean of gradients of {what}"))

    def mean(self, tensor: Any) -> Any:
        """The mean of a tensor or of slices over the copies, in a step of its own. Collective."""
        kind = _kind(tensor)
        title = f"hvd.allreduce() of {_text(tensor)}"
        return self._graph({"what they call": title}, kind, lambda: Averaging([kind], [], title)).alone(tensor)

    def joined(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Tensors of all copies, one after the other along axis 0, in a function of TensorFlow's that is traced.
        Collective."""
        if self.count == 1 or not tensors:
            return list(tensors)
        types = [each.dtype for each in tensors]
        title = f"results of {', '.join(each.name for each in types)} that copies give each other"
        every = [(copy, at) for copy in range(self.count) for at in range(len(types))]
        graph = self._graph(
            {"what they call": title},
            (),
            lambda: SmallGraph(
                [Operation(copy, [], types) for copy in range(self.count)],
                every,
                title,
                ["its results"] * self.count,
                _GROUP,
            ),
        )
        token, values = graph.put(graph.begin(), lambda *_: tensors)
        graph.end(token)
        return [_along_rows([values[copy, at] for copy in range(self.count)], each) for at, each in enumerate(tensors)]

    def take_values(self, variables: Sequence[tf.Variable], source: int) -> None:
        """Gives variables of all copies the values that they have in one. Collective."""
        if self.count == 1 or not variables:
            return
        types = [variable.dtype for variable in variables]
        title = f"hvd.broadcast_variables() from copy {source} of {', '.join(each.name for each in types)}"
        values = [(0, at) for at in range(len(variables))]
        graph = self._graph(
            {"what they call": title},
            (),
            lambda: SmallGraph([Operation(source, [], types)], values, title, ["the values"], _GROUP),
        )

        def take() -> None:
            token, values = graph.put(graph.begin(), lambda *_: [each.read_value() for each in variables])
            if self.own == source:
                return graph.end(token)
            assigned = [
                each.assign(tf.ensure_shape(values[0, at], each.shape), read_value=False)
                for at, each in enumerate(variables)
            ]
            with tf.control_dependencies(assigned):
                return graph.end(tf.identity(token))

        tf.function(take, autograph=False)()

    def _graph(self, said: dict[str, str], more: tuple, make: Callable[[], Any]) -> Any:
        """The graph that `make` adds the first time, once all copies have said the same: so copies number graphs alike,
        whatever one of them does instead."""
        key = (*said.items(), more)
        if key not in self._graphs:
            self.require_same(said, lambda name, here, there: f"{name} is {_said(here)} and {_said(there)}")
            self._graphs[key] = make()
        return self._graphs[key]


def _along_rows(parts: list[tf.Tensor], like: tf.Tensor) -> tf.Tensor:
    tensor = tf.concat(parts, 0)
    tensor.set_shape([None, *like.shape[1:]] if like.shape.rank is not None else None)
    return tensor


def _kind(gradient: Any) -> tuple[bool, tf.DType, tf.DType]:
    if _are_slices(gradient):
        return True, gradient.values.dtype, gradient.indices.dtype
    return False, gradient.dtype, tf.int32


def _text(gradient: Any) -> str:
    if _are_slices(gradient):
        return f"slices of {gradient.values.dtype.name} with indices of {gradient.indices.dtype.name}"
    return f"{gradient.dtype.name} {gradient.shape}"


def _said(text: str | None) -> str:
    return "no gradient" if text is None else text


def of_job() -> Copies:
    """Copies of the model of the job there is."""
    return current.job().own(Copies)
