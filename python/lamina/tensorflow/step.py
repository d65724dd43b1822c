# SPDX-License-Identifier: Apache-2.0
"""Step functions, and what they return."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorflow.python.ops import control_flow_util

from lamina.errors import UsageError
from lamina.job import current
from lamina.tensorflow import copies, exchange, graphs, running, slices
from lamina.tensorflow.body import Body
from lamina.tensorflow.conversion import converted
from lamina.tensorflow.installed import OPERATORS, tf
from lamina.tensorflow.model import ModelOfJob
from lamina.tensorflow.variables import of_tensorflow

_METHODS = ("variable", "add_n", "accumulate_n")


class StepOutput:
    """Results of a step function, one of each microbatch."""

    __iter__ = None

    def __init__(self, outputs: Sequence[Any], mean: Any = None):
        """Takes them.

        Args:
            outputs: in the order of the microbatches.
            mean: of those of all copies of the model, where they come of gradients.
        """
        self._outputs, self._mean = list(outputs), mean
        if mean is not None:
            mean._lamina_of_all_copies = True

    @property
    def outputs(self) -> list[Any]:
        """They in the order of the microbatches.

        Errors:
            UsageError: they come of gradients, of one of several copies of the model.
        """
        if self._mean is not None:
            raise UsageError(
                "gradients of single microbatches are those of one copy of the model: accumulate(), reduce_mean() and "
                "reduce_sum() are of all copies"
            )
        return self._outputs

    def accumulate(self, method: str = "variable", var: tf.Variable | None = None) -> Any:
        """The mean over microbatches: of gradients of losses that are means, the gradient of the whole batch's; of
        gradients, it is over all copies of the model. None where microbatches returned None; of slices, slices whose
        indices are unique.

        Args:
            method: "variable", "add_n" or "accumulate_n", which all add in the order of the microbatches.
            var: a variable that the mean is put into.
        """
        if method not in _METHODS:
            raise UsageError(f"accumulate() takes {', '.join(_METHODS)}, not {method!r}")
        mean = self.reduce_mean()
        return mean if var is None or mean is None else var.assign(mean)

    def reduce_mean(self) -> Any:
        """The mean over microbatches; of gradients, over copies of the model, too."""
        return self._mean if self._mean is not None else _divided(self.reduce_sum(), len(self._outputs))

    def reduce_sum(self) -> Any:
        """The sum over microbatches, added in their order; of gradients, its mean over copies of the model."""
        if self._mean is not None:
            return _divided(self._mean, 1 / len(self._outputs))
        if any(each is None for each in self._outputs):
            return None
        if any(isinstance(each, tf.IndexedSlices) for each in self._outputs):
            return slices.added(self._outputs)
        return functools.reduce(tf.add, self._outputs)

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
        return f"StepOutput({self._outputs!r})"


def _divided(total: Any, count: float) -> Any:
    if isinstance(total, tf.IndexedSlices):
        return slices.divided(total, count)
    return None if total is None else total / count


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
        each, means = self._function(*arguments, **keywords)
        outputs = zip(zip(*map(tf.nest.flatten, each), strict=True), means, strict=True)
        return tf.nest.pack_sequence_as(each[0], [StepOutput(*output) for output in outputs])

    @property
    def _title(self) -> str:
        return f"the step function {getattr(self, '__name__', self._body)}"

    def _traced(self, *arguments: Any, **keywords: Any) -> tuple[list[Any], list[Any]]:
        with running.telling_others(self._title):
            return self._put(arguments, keywords)

    def _put(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """Puts its body into the graph of the step, for each microbatch. Returns what each returns, and the means of
        results that come of gradients, over all copies; None in the places of others."""
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
        averaging = _Averaged.of(body, self._title)
        token = _begin(body.trace, count, leaves, averaging)
        pieces = [self._pieces(name, leaf, count, token) for name, leaf in leaves]
        outputs, ends = [], []
        for microbatch in range(count):
            tensors = [piece[microbatch] for piece in pieces if tf.is_tensor(piece[microbatch])]
            returned, through = body.put(microbatch, token, tensors)
            outputs.append(returned)
            ends += through
        means: list[Any] = [None] * len(tf.nest.flatten(outputs[0]))
        if averaging is not None:
            ends.append(averaging.put(token, ends, outputs, means))
        if trace.call is not None or averaging is not None:
            with tf.control_dependencies(ends):
                OPERATORS.smp_end(one_copy=trace.call is not None, copies=averaging is not None)
        return outputs, means

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


class _Averaged:
    """Results of a body that come of gradients, of which the step gives the means over all copies of the model.
    Statistics of the model are those of the first copy from then on."""

    def __init__(self, body: Body, statistics: list[tf.Variable], title: str):
        self._numbers, self._statistics = body.gradients, statistics
        gradients = {number: body.results[number] for number in self._numbers}
        self._averaging = copies.of_job().averaging(title, gradients, statistics)

    @classmethod
    def of(cls, body: Body, title: str) -> "_Averaged | None":
        """Returns those of a body; None where copies have nothing to give each other."""
        if copies.of_job().count == 1:
            return None
        model = current.job().own(ModelOfJob).model if body.trace.backward else None
        variables = [of_tensorflow(each) for each in model.non_trainable_variables] if model is not None else []
        owners = current.job().own(ModelOfJob).owners  # not those of metrics of Keras 2
        statistics = [each for each in variables if graphs.has_gradients(each) and id(each) in owners]
        return cls(body, statistics, title) if body.gradients or statistics else None

    @property
    def number(self) -> int:
        """The graph that averages them."""
        return self._averaging.number

    def put(self, token: tf.Tensor, ends: list[tf.Tensor], outputs: list[Any], means: list[Any]) -> tf.Tensor:
        """Puts it behind the microbatches. Returns what is there once the step may end.

        Args:
            token: begins the way.
            ends: are there once the microbatches are through.
            outputs: what microbatches return.
            means: get the means, in the places of these results.
        """
        flat = [tf.nest.flatten(each) for each in outputs]
        own = [StepOutput([each[number] for each in flat]).reduce_mean() for number in self._numbers]
        with tf.control_dependencies(ends):
            statistics = [each.read_value() for each in self._statistics]
        token, averaged, first = self._averaging.put(token, own, statistics)
        for number, mean in zip(self._numbers, averaged, strict=True):
            means[number] = mean
        with tf.control_dependencies([token]):
            changed = [
                variable.assign(tf.ensure_shape(value, variable.shape), read_value=False)
                for variable, value in zip(self._statistics, first, strict=True)
                if copies.of_job().own > 0
            ]
        with tf.control_dependencies([token, *changed]):
            return tf.identity(token)


def _begin(
    trace: running.StepTrace, count: int, leaves: list[tuple[str, Any]], averaging: _Averaged | None
) -> tf.Tensor:
    """Begins the step; the ranks compare their arguments in it. Returns the token that begins the ways of the
    microbatches."""
    over_copies = {} if averaging is None else {"copies": averaging.number}
    if trace.call is None:
        return exchange.turns().begin(**over_copies) if over_copies else tf.constant(0.0)
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
        **over_copies,
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
