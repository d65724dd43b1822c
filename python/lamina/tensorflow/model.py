# SPDX-License-Identifier: Apache-2.0
"""The model that is cut over ranks."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

from lamina import _lamina
from lamina.errors import ConfigError, DesyncError, UsageError, refusal
from lamina.job import current
from lamina.tensorflow import copies, exchange, graphs, older_keras, random_numbers, running, saved_model, traced
from lamina.tensorflow.division import Divided, Passage, Segment, Subgraph
from lamina.tensorflow.gradients import noting
from lamina.tensorflow.installed import OF_KERAS_2, OPERATORS, keras, tf
from lamina.tensorflow.variables import give_back, of_tensorflow
from lamina.util.told import tell

_CHANNEL = "graphs"


class _Graph:
    """A call of the model with arguments of one kind, as this rank takes part in it.

    Attributes:
        segments: those of this rank.
        watched: results that have gradients, by number.
    """

    def __init__(self, number: int, subgraphs: list[Subgraph], call: traced.Call):
        self.number = number
        self.inputs = call.inputs
        self.structure = call.structure
        self.results = [tensor.name for tensor in call.results]
        self.outside = subgraphs[-1]
        self.watched = call.watched()
        self._constants = {
            tensor.name: tf.make_ndarray(constant.attr["value"].tensor)
            for tensor in call.results
            if (constant := call.constant(tensor)) is not None
        }
        specs = {tensor.name: tensor for tensor in call.graph.inputs}
        specs |= {tensor.name: tensor for each in call.outputs.values() for tensor in each}
        self.segments = [
            Segment(
                subgraph,
                call.known,
                [tf.TensorSpec(specs[name].shape, specs[name].dtype) for name in subgraph.arguments],
            )
            for subgraph in subgraphs[:-1]
        ]

    def run(self, trace: running.StepTrace, hidden: tf.Variable, arguments: list[tf.Tensor]) -> Any:
        """Adds this rank's part of the call to the graph of the step function that is traced."""
        # The hidden variable leads gradients through segments that have none of their own.
        token = trace.enter(self) + 0.0 * hidden.read_value()
        values = dict(zip(self.inputs, map(tf.stop_gradient, arguments), strict=True))
        values |= {name: tf.constant(value) for name, value in self._constants.items()}
        for at, segment in enumerate(self.segments):
            subgraph = segment.subgraph
            token, _ = self._receive(at, token, subgraph.receives, values, [])
            token, *outputs = segment.function(token, *(values[name] for name in subgraph.arguments))
            running.run_freely(token.op)
            values.update(zip(subgraph.outputs, outputs, strict=True))
            sent = [values[passage.name] for passage in subgraph.sends]
            token = self._send(at, token, sent, subgraph.sends)
        made = {name for segment in self.segments for name in segment.subgraph.outputs}
        came = {passage.name for segment in self.segments for passage in segment.subgraph.receives}
        here = [name for name in dict.fromkeys(self.results) if name in made | came]
        # The rank that made a result takes its gradient.
        passed = [values[name] if name in made else tf.stop_gradient(values[name]) for name in here]
        token, passed = self._receive(len(self.segments), token, self.outside.receives, values, passed)
        values.update(zip(here, passed, strict=True))
        trace.ends.append(token)
        results = [
            noting(trace, number, values[name]) if number in self.watched else values[name]
            for number, name in enumerate(self.results)
        ]
        structure = tf.nest.pack_sequence_as(self.structure, _with_none(self.structure, results))
        returned, trace.losses, masks, trace.metrics = structure
        for each, mask in zip(tf.nest.flatten(returned), masks, strict=True):
            if mask is not None:
                each._keras_mask = mask
        return returned

    def _receive(
        self,
        at: int,
        token: tf.Tensor,
        passages: list[Passage],
        values: dict[str, tf.Tensor],
        passed: list[tf.Tensor],
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        made = OPERATORS.smp_input(
            token=token,
            passed=passed,
            graph=self.number,
            segment=at,
            microbatch=0,  # of the body, which others are made of
            backward=False,
            gradients=[passage.gradient for passage in passages],
            Treceived=[tf.as_dtype(passage.dtype) for passage in passages],
            shapes=[tf.TensorShape(passage.shape) for passage in passages],
        )
        running.run_freely(made.next.op)
        values.update(zip((passage.name for passage in passages), made.received, strict=True))
        return made.next, made.passed_on

    def _send(
        self,
        at: int,
        token: tf.Tensor,
        sent: list[tf.Tensor],
        passages: list[Passage],
    ) -> tf.Tensor:
        made = OPERATORS.smp_output(
            token=token,
            sent=sent,
            passed=[],
            graph=self.number,
            segment=at,
            microbatch=0,  # of the body, which others are made of
            backward=False,
            gradients=[passage.gradient for passage in passages],
        )
        running.run_freely(made.next.op)
        return made.next


def _with_none(structure: Any, results: list[tf.Tensor]) -> list[Any]:
    """The results in the order of the structure, which may have None, too."""
    rest = iter(results)
    return [None if each is None else next(rest) for each in tf.nest.flatten(structure)]


class ModelOfJob:
    """The one model that a job has.

    Attributes:
        model: None before it is made.
        hidden: the variable that leads gradients through segments that have none of their own.
        calls: its traced calls, by the kind of their arguments.
        graphs: what they have become, by that and by the results whose gradients are taken.
        owners: partitions of its variables, by their ids.
        first_call: what it was first called with: the structure, and the specs of its tensors; None before.
        hooks: what runs once its variables have owners.
        traces: its call is traced.
        losses: what its layers have added, in a step that is over; None else.
        joins_metrics: who calls it counts metrics of its layers, by the whole batch.
    """

    def __init__(self):
        self.model: CutModel | None = None
        self.hidden = tf.Variable(0.0, trainable=True, name="lamina_token")
        self.calls: dict[tuple, traced.Call] = {}
        self.graphs: dict[tuple, _Graph] = {}
        self.owners: dict[int, int] = {}
        self.first_call: tuple[Any, list[tf.TensorSpec | None]] | None = None
        self.hooks: list[Callable[[], Any]] = []
        self.traces = False
        self.losses: list[tf.Tensor] | None = None
        self.joins_metrics = False

    @contextlib.contextmanager
    def giving_losses(self, losses: list[tf.Tensor]) -> Iterator[None]:
        """Has `model.losses` be these."""
        self.losses = losses
        try:
            yield
        finally:
            self.losses = None

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Has the model's layers read variables that other ranks own, as parts of a graph."""
        self.traces = True
        try:
            yield
        finally:
            self.traces = False


class CutModel(keras.Model):
    """A Keras model whose `call` is cut over the ranks of the job, at its first call in a step function. See
    `DistributedModel`, which is one with Keras's own loop."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        state = current.job().own(ModelOfJob)
        if state.model is not None:
            raise refusal("model-twice")
        if tf.distribute.has_strategy():
            raise UsageError("a DistributedModel in a strategy of tf.distribute: lamina places its variables itself")
        state.model = self
        self.__dict__["_lamina"] = state  # past Keras, which tracks what is assigned

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if "_lamina" not in self.__dict__:
            raise UsageError(
                f"{type(self).__name__} has not called DistributedModel's __init__: call super().__init__()"
            )
        if self._lamina.traces:  # Keras's own calls, to build it
            return super().__call__(*arguments, **keywords)
        trace = running.current("a call of a DistributedModel")
        flat, tensors = _flat((arguments, keywords))
        given = [tensor for tensor in tensors if tensor is not None]
        key = tuple(
            each if tensor is None else (tensor.dtype.name, _sizes(tensor))
            for each, tensor in zip(flat, tensors, strict=True)
        )
        graphs = self._lamina.graphs
        if (key, trace.wanted) not in graphs:
            with traced.lifted():
                graphs[key, trace.wanted] = self._take_part((arguments, keywords), tensors, key, trace.wanted)
        returned = graphs[key, trace.wanted].run(trace, self._lamina.hidden, given)
        if not self._lamina.joins_metrics:
            older_keras.count(self, trace.metrics)
        return returned

    def _trace(self, structure: Any, tensors: list[tf.Tensor | None]) -> traced.Call:
        flat = tf.nest.flatten(structure)

        def call(*given: tf.Tensor) -> Any:
            rest = iter(given)
            filled = [each if tensor is None else next(rest) for each, tensor in zip(flat, tensors, strict=True)]
            arguments, keywords = tf.nest.pack_sequence_as(structure, filled)
            with older_keras.taking_metrics(self) if OF_KERAS_2 else contextlib.nullcontext(dict) as metrics:
                returned = self(*arguments, **keywords)
            masks = [getattr(each, "_keras_mask", None) for each in tf.nest.flatten(returned)]
            return returned, list(self._keras_losses()), masks, metrics()

        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors if tensor is not None]
        with self._lamina.tracing():
            made = traced.trace(self, call, specs, self._all)
        random_numbers.refuse(made.definition, "the model")
        self._clear_losses()
        return made

    def _take_part(
        self, structure: Any, tensors: list[tf.Tensor | None], key: tuple, wanted: frozenset[int] | None
    ) -> _Graph:
        """Traces the call, sees that all ranks trace the same, has rank 0 plan, and takes what it sends."""
        calls = self._lamina.calls
        try:
            call = calls.get(key) or self._trace(structure, tensors)
            with self._lamina.tracing():  # gradients of one's own may call layers
                call.differentiable(None)
                call.differentiable(wanted)
        except Exception as error:
            exchange.of_job().words({"error": f"{type(error).__name__}: {error}"})
            raise
        calls[key] = call
        names = [f"{operation.name} ({operation.type})" for operation in call.operations]
        title = f"the model's call with {', '.join(str(each) for each in key)}"
        shapes = [f"variable {name}: {variable.dtype.name}{variable.shape}" for name, variable in self._named(call)]
        gradients = "all" if wanted is None else sorted(wanted)
        same = [title, *names, *shapes, f"gradients of results: {gradients}"]
        require_same(exchange.of_job().words({"same": same}))
        if self._fresh(call):
            every = dict(enumerate([*names, *shapes]))
            copies.of_job().require_same(
                {str(number): text for number, text in every.items()},
                lambda _, here, there: f"the model's call has {here} and {there}",
            )
        session = current.job().session
        ranks = session.group_members("partitions")
        own = ranks.index(session.rank)
        partitions, subgraphs, values = self._shared_out(call, wanted, ranks, own)
        for number, value in values.items():
            call.known[number].assign(value)
        fresh = self._settle(call, partitions)
        for name, variable in self._named(call):
            owner = self._lamina.owners[id(variable)]
            if id(variable) in fresh and owner != own:
                give_back(variable, name, ranks[owner], lambda: self._lamina.traces)
        cut = _engine_cut(call, wanted, partitions, len(ranks))
        if self._lamina.first_call is None:
            self._lamina.first_call = _described(structure, tensors)
            for hook in self._lamina.hooks:
                hook()
        return _Graph(_lamina.add_graph(session, cut, call.computed(), names, title), subgraphs, call)

    def _shared_out(self, call: traced.Call, wanted: frozenset[int] | None, ranks: list[int], own: int) -> tuple:
        """Operations' partitions, this rank's subgraphs, and values of variables that had no owner, from the first rank
        of this copy of the model."""
        session = current.job().session
        if own != 0:
            return _received(ranks[0])
        try:
            partitions, values = self._planned(call)
            cut = _engine_cut(call, wanted, partitions, len(ranks))
            divided = Divided(call, wanted, cut.segments, cut.crossings)
            owners = _owners(call, partitions)
            every = [
                (
                    partitions,
                    divided.of(at),
                    {number: value for number, value in values.items() if owners.get(number, 0) == at},
                )
                for at in range(len(ranks))
            ]
        except Exception as error:
            _send_all(ranks[1:], (str(error),))
            raise
        for rank, parts in zip(ranks[1:], every[1:], strict=True):
            session.send(rank, _CHANNEL, (None, *parts))
        return every[0]

    def _fresh(self, call: traced.Call) -> list[int]:
        """The variables that have no owner, by number."""
        return [number for number, each in enumerate(call.known) if id(each) not in self._lamina.owners]

    def _planned(self, call: traced.Call) -> tuple[list[int], dict[int, Any]]:
        """Operations' partitions, and values of variables that had no owner: of the first copy of the model, but for
        integers, as states of random numbers are, which are each copy's own."""
        fresh, copy = self._fresh(call), copies.of_job()
        if not fresh or copy.own == 0:
            try:
                planned = self._plan(call), {number: call.known[number].numpy() for number in fresh}
            except Exception as error:
                if fresh:
                    _send_all(copy.ranks[1:], (str(error),))
                raise
            if fresh:
                _send_all(copy.ranks[1:], (None, *planned))
            return planned
        partitions, values = _received(copy.ranks[0])
        own = {number: call.known[number].numpy() for number in fresh if not graphs.has_gradients(call.known[number])}
        return partitions, values | own

    def _settle(self, call: traced.Call, partitions: list[int]) -> set[int]:
        """Gives variables without an owner theirs; those that no operation uses go to the first partition. Returns
        their ids."""
        owners = _owners(call, partitions)
        fresh = {id(each): owners.get(number, 0) for number, each in enumerate(call.known)}
        fresh = {one: owner for one, owner in fresh.items() if one not in self._lamina.owners}
        self._lamina.owners.update(fresh)
        return set(fresh)

    def _plan(self, call: traced.Call) -> list[int]:
        config, owners = current.job().session.config, self._lamina.owners
        placed = {number: owners[id(each)] for number, each in enumerate(call.known) if id(each) in owners}
        partitions, text = _lamina.place_operations(
            config, call.to_place(not config.auto_partition, placed), self._sizes(call), call.computed()
        )
        if text and not owners:
            tell(text.rstrip())
        return partitions

    def plan_rows(self, *arguments: Any, **keywords: Any) -> list[dict[str, Any]]:
        """The rows of a plan for a call with these arguments of one microbatch."""
        structure = (arguments, keywords)
        with traced.lifted():
            call = self._trace(structure, _flat(structure)[1])
        return _lamina.graph_rows(call.to_place(False, {}), self._sizes(call), call.computed())

    def _sizes(self, call: traced.Call) -> list[tuple[str, int]]:
        """The name and the bytes of each variable."""
        return [(name, each.shape.num_elements() * each.dtype.size) for name, each in self._named(call)]

    def _keras_losses(self) -> list[Any]:
        return super().losses

    def _keras_variables(self) -> list[Any]:
        return older_keras.variables(self) if OF_KERAS_2 else super().variables

    def _all(self) -> list[tf.Variable]:
        return [of_tensorflow(variable) for variable in self._keras_variables()]

    def _named(self, call: traced.Call) -> list[tuple[str, tf.Variable]]:
        names = {id(of_tensorflow(each)): getattr(each, "path", each.name) for each in self._keras_variables()}
        return [(names[id(variable)], variable) for variable in call.known]

    def _own(self, variables: list[Any]) -> list[Any]:
        state = self.__dict__.get("_lamina")
        if state is None or not state.owners or state.traces:
            return variables
        session = current.job().session
        partition = session.group_members("partitions").index(session.rank)
        return [each for each in variables if state.owners.get(id(of_tensorflow(each)), 0) == partition]

    @property
    def variables(self) -> list[Any]:
        return self._own(super().variables)

    @property
    def trainable_variables(self) -> list[Any]:
        return self._own(super().trainable_variables)

    @property
    def non_trainable_variables(self) -> list[Any]:
        return self._own(super().non_trainable_variables)

    @property
    def losses(self) -> list[tf.Tensor]:
        if "_lamina" not in self.__dict__ or self._lamina.traces:  # Keras's own calls, to build it
            return super().losses
        if self._lamina.losses is not None:
            return list(self._lamina.losses)
        losses = running.current("model.losses").losses
        if losses is None:
            raise UsageError("model.losses before the model is called: the call makes them")
        return list(losses)

    def save_model(self, save_path: str = "/opt/ml/model") -> None:
        """Writes the whole model as a SavedModel, on rank 0; collective. `serving_default` takes what the model was
        first called with, in any number of samples, and returns its results without training: `output_0` where that is
        one tensor.

        Errors:
            UsageError: before the first step, or rank 0 could not write it.
        """
        saved_model.save(self, os.fspath(save_path))

    def profile(self, *_: Any, **__: Any) -> None:
        """Takes a batch, as scripts give it before the first step. The plan needs none: the traced call has all
        shapes."""


def _received(rank: int) -> tuple[Any, ...]:
    error, *parts = current.job().session.receive(rank, _CHANNEL)
    if error is not None:
        raise ConfigError(f"rank {rank}: {error}")
    return tuple(parts)


def _send_all(ranks: list[int], parts: tuple[Any, ...]) -> None:
    for rank in ranks:
        current.job().session.send(rank, _CHANNEL, parts)


def _flat(structure: Any) -> tuple[list[Any], list[tf.Tensor | None]]:
    """Returns what a call is given, one after the other, and the tensors among it."""
    flat = tf.nest.flatten(structure)
    return flat, [tf.convert_to_tensor(each) if _is_data(each) else None for each in flat]


def _described(structure: Any, tensors: list[tf.Tensor | None]) -> tuple[Any, list[tf.TensorSpec | None]]:
    specs = [each if each is None else tf.TensorSpec(each.shape, each.dtype) for each in tensors]
    flat = [each if spec is None else None for each, spec in zip(tf.nest.flatten(structure), specs, strict=True)]
    return tf.nest.pack_sequence_as(structure, flat), specs


def _is_data(each: Any) -> bool:
    return tf.is_tensor(each) or hasattr(each, "__array__")


def _sizes(tensor: tf.Tensor) -> Any:
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())


def require_same(words: list[dict[str, Any]]) -> None:
    """Raises DesyncError where the ranks of this copy of the model, whose words these are, have not traced the same."""
    ranks = current.session().group_members("partitions")
    for rank, each in zip(ranks, words, strict=True):
        if "error" in each:
            raise DesyncError(f"rank {rank} could not trace the model's call: {each['error']}")
    for rank, each in zip(ranks, words, strict=True):
        for theirs, mine in itertools.zip_longest(words[0]["same"], each["same"]):
            if mine != theirs:
                raise DesyncError(f"the model's call differs: rank {rank} traced {mine}, and rank {ranks[0]} {theirs}")


def _engine_cut(
    call: traced.Call, wanted: frozenset[int] | None, partitions: list[int], count: int
) -> _lamina.GraphCut:
    differentiable = call.differentiable(wanted)
    return _lamina.cut_graph(
        partitions,
        [call.sources(operation) for operation in call.operations],
        [call.after(operation) for operation in call.operations],
        [[tensor.name in differentiable for tensor in call.outputs[each.name]] for each in call.operations],
        call.computed(),
        count,
    )


def _owners(call: traced.Call, partitions: list[int]) -> dict[int, int]:
    return {
        variable: partition
        for operation, partition in zip(call.operations, partitions, strict=True)
        for variable in call.used(operation)
    }
