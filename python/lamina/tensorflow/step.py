# SPDX-License-Identifier: Apache-2.0
"""Step functions, and what they return."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorflow.python.ops import control_flow_util

from lamina.errors import UsageError
from lamina.job import current
from lamina.tensorflow import exchange, running
from lamina.tensorflow.body import Body
from lamina.tensorflow.conversion import converted
from lamina.tensorflow.installed import OPERATORS, tf

_METHODS = ("variable", "add_n", "accumulate_n")


class StepOutput:
    """Results of a step function, one of each microbatch.

    Attributes:
        outputs: in the order of the microbatches.
    """

    __iter__ = None

    def __init__(self, outputs: Sequence[Any]):
        self.outputs = list(outputs)

    def accumulate(self, method: str = "variable", var: tf.Variable | None = None) -> Any:
        """The mean over microbatches: of gradients of losses that are means, the gradient of the whole batch's. None
        where microbatches returned None; of slices, slices whose indices are unique.

        Args:
            method: "variable", "add_n" or "accumulate_n", which all add in the order of the microbatches.
            var: a variable that the mean is put into.
        """
        if method not in _METHODS:
            raise UsageError(f"accumulate() takes {', '.join(_METHODS)}, not {method!r}")
        mean = self.reduce_mean()
        return mean if var is None or mean is None else var.assign(mean)

    def reduce_mean(self) -> Any:
        """The mean over microbatches."""
        return _scaled(self.reduce_sum(), len(self.outputs))

    def reduce_sum(self) -> Any:
        """The sum over microbatches, added in their order."""
        if any(each is None for each in self.outputs):
            return None
        if any(isinstance(each, tf.IndexedSlices) for each in self.outputs):
            return _sum_of_slices(self.outputs)
        return functools.reduce(tf.add, self.outputs)

    def concat(self) -> tf.Tensor:
        """The tensors one after the other along axis 0: the whole batch again. Scalars are stacked."""
        return self.stack() if self.outputs[0].shape.rank == 0 else tf.concat(self.outputs, 0)

    def merge(self) -> tf.Tensor:
        """`concat`."""
        return self.concat()

    def stack(self) -> tf.Tensor:
        """The tensors along a new axis 0."""
        return tf.stack(self.outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


def _scaled(total: Any, count: int) -> Any:
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values / count, total.indices, total.dense_shape)
    return None if total is None else total / count


def _sum_of_slices(slices: list[tf.IndexedSlices]) -> tf.IndexedSlices:
    values = tf.concat([each.values for each in slices], 0)
    unique, places = tf.unique(tf.concat([each.indices for each in slices], 0))
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(values, places, tf.size(unique)), unique, slices[0].dense_shape
    )


class StepFunction:
    """A function that runs once per microbatch of its arguments, all as one function of TensorFlow's."""

    def __init__(self, body: Callable[..., Any], whole: Sequence[str], axes: Mapping[str, int], options: dict):
        functools.update_wrapper(self, body)
        self._body = body
        self._converted = converted(body, options.pop("autograph", True))
        self._whole, self._axes = set(whole), dict(axes)
        self._function = tf.function(self._traced, autograph=False, **options)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        current.job()
        _refuse_contexts()
        each = self._function(*arguments, **keywords)
        return tf.nest.map_structure(lambda *outputs: StepOutput(outputs), *each, expand_composites=False)

    def _traced(self, *arguments: Any, **keywords: Any) -> list[Any]:
        with running.telling_others(f"the step function {getattr(self, '__name__', self._body)}"):
            return self._put(arguments, keywords)

    def _put(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        """Puts its body into the graph of the step, for each microbatch."""
        count = current.job().session.config.microbatches
        # In the order in which TensorFlow flattens them.
        named = [*zip(_names(self._body, len(arguments)), arguments, strict=True), *sorted(keywords.items())]
        leaves = [(name, leaf) for name, argument in named for leaf in tf.nest.flatten(argument)]
        pieces = [self._pieces(name, leaf, count) for name, leaf in leaves]
        first = [piece[0] for piece in pieces]
        body = Body(self._converted, (arguments, keywords), first, None)
        trace = body.trace
        if trace.backward and trace.reached != trace.call.watched:
            body = Body(self._converted, (arguments, keywords), first, frozenset(trace.reached))
        token = tf.constant(0.0) if trace.call is None else _begin(body.trace, count, leaves)
        pieces = [self._pieces(name, leaf, count, token) for name, leaf in leaves]
        outputs, ends = [], []
        for microbatch in range(count):
            tensors = [piece[microbatch] for piece in pieces if tf.is_tensor(piece[microbatch])]
            returned, through = body.put(microbatch, token, tensors)
            outputs.append(returned)
            ends += through
        if trace.call is not None:
            with tf.control_dependencies(ends):
                OPERATORS.smp_end()
        return outputs

    def _pieces(self, name: str, leaf: Any, count: int, token: tf.Tensor | None = None) -> list[Any]:
        """The leaf of an argument for each microbatch, of which those of an unknown size are made once the token is
        there."""
        if name in self._whole or not tf.is_tensor(leaf) or leaf.shape.rank == 0:
            return [leaf] * count
        axis = self._axes.get(name, 0)
        rows = leaf.shape[axis] if leaf.shape.rank is not None else None
        if rows is not None and rows % count:
            raise UsageError(f"{name} has {rows} samples along axis {axis}, which {count} microbatches do not divide")
        if rows is not None or token is None:
            return tf.split(leaf, count, axis)
        # A failure in a step that has begun is that of the step, on every rank.
        words = f"{name} has a number of samples along axis {axis} that {count} microbatches do not divide"
        with tf.control_dependencies([token]):
            divides = tf.debugging.assert_equal(tf.shape(leaf)[axis] % count, 0, words)
        with tf.control_dependencies([divides]):
            return tf.split(leaf, count, axis)


def _begin(trace: running.StepTrace, count: int, leaves: list[tuple[str, Any]]) -> tf.Tensor:
    """Begins the step; the ranks compare their arguments in it."""
    compared = {}
    for name, leaf in leaves:
        many = f"{name}, tensor {sum(key.split(',')[0] == name for key in compared)}"
        key = many if name in compared else name
        if tf.is_tensor(leaf):
            if leaf.dtype not in (tf.resource, tf.variant):
                compared[key] = leaf
        elif leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes)):
            compared[key] = tf.constant(repr(leaf))
    return exchange.turns().begin(
        arguments=list(compared.values()),
        names=list(compared),
        graph=trace.call.number,
        microbatches=count,
        backward=trace.backward,
    )


def _refuse_contexts() -> None:
    if tf.distribute.has_strategy():
        raise UsageError("a step function in a strategy of tf.distribute: lamina spreads the model itself")
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UsageError(
            "a step function in a tf.function with jit_compile: what waits for other ranks is not compiled; use "
            "tf.config.optimizer.set_jit(True)"
        )


def _names(body: Callable[..., Any], count: int) -> list[str]:
    known = body.__code__.co_varnames[: body.__code__.co_argcount] if hasattr(body, "__code__") else ()
    return [known[at] if at < len(known) else f"argument {at}" for at in range(count)]


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    **options: Any,
) -> Any:
    """Makes a function run once per microbatch: `@smp.step`, `@smp.step()`.

    Args:
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: the axis along which an argument is split, by name; 0 for others.
        **options: of `tf.function`.
    """
    if options.pop("jit_compile", None):
        raise UsageError(
            "jit_compile of a step function: operators that wait for other ranks are not compiled; have what lies "
            "between them compiled by tf.config.optimizer.set_jit(True)"
        )
    if function is None:
        return functools.partial(step, non_split_inputs=non_split_inputs, input_split_axes=input_split_axes, **options)
    return StepFunction(function, non_split_inputs, input_split_axes or {}, options)
