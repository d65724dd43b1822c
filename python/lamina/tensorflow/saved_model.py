# SPDX-License-Identifier: Apache-2.0
"""The whole model as a SavedModel: its call without training, and the values of all ranks."""

import inspect
from typing import Any

from lamina.errors import UsageError
from lamina.job import current
from lamina.tensorflow import graphs
from lamina.tensorflow.installed import tf
from lamina.tensorflow.own_gradients import ATTRIBUTE
from lamina.tensorflow.traced import Call

_CHANNEL = "saved model"


def save(model: Any, path: str) -> None:
    """Has rank 0 write it; collective. `serving_default` takes what the model was first called with, in
    any number of samples, and returns the model's results: `output_0` where that is one tensor.

    Errors:
        UsageError: before the first step, or rank 0 could not write it.
    """
    state = model._lamina
    if state.first_call is None:
        raise UsageError("save_model() before the first step, which says what the model is called with")
    session = current.job().session
    ranks = session.group_members("partitions")
    own = ranks.index(session.rank)
    variables = model._keras_variables()
    owners = [state.owners.get(id(each), 0) for each in model._all()]
    if session.rank != 0:
        for variable, owner in zip(variables, owners, strict=True):
            if owner == own and ranks[0] == 0:  # of the first copy of the model
                session.send(0, _CHANNEL, variable.numpy())
        error = session.receive(0, _CHANNEL)
        if error is not None:
            raise UsageError(f"rank 0 could not save the model: {error}")
        return
    error = None
    try:
        values = [
            variable.numpy() if owner == 0 else session.receive(ranks[owner], _CHANNEL)
            for variable, owner in zip(variables, owners, strict=True)
        ]
        with tf.init_scope():
            _write(model, values, path)
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
        raise
    finally:
        for rank in session.group_members("world")[1:]:
            session.send(rank, _CHANNEL, error)


def _write(model: Any, values: list[Any], path: str) -> None:
    names, call = _traced(model)
    module = tf.Module()
    named = zip((each.name.partition(":")[0] for each in model._keras_variables()), values, strict=True)
    module.weights = [tf.Variable(value, name=name) for name, value in named]
    definition = _without_training(call)

    def serve(*given: tf.Tensor) -> Any:
        graph = tf.compat.v1.get_default_graph()
        known = dict(zip(call.inputs, given, strict=True))
        known |= {name: graph.capture(module.weights[at].handle) for name, at in call.variables.items()}
        made = iter(graphs.put(definition, known, [tensor.name for tensor in call.results]))
        flat = [None if each is None else next(made) for each in tf.nest.flatten(call.structure)]
        returned, *_ = tf.nest.pack_sequence_as(call.structure, flat)
        return _as_outputs(returned)

    specs = {tensor.name: tensor for tensor in call.graph.inputs}
    served = tf.function(serve, autograph=False).get_concrete_function(
        *(
            tf.TensorSpec(specs[tensor].shape, specs[tensor].dtype, name)
            for name, tensor in zip(names, call.inputs, strict=True)
        )
    )
    # Gradients of operations' own are functions of this process.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(module, path, signatures={"serving_default": served}, options=options)


def _traced(model: Any) -> tuple[list[str], Call]:
    """The names of the tensors that the model takes, and its call without training: of any number of samples, or of as
    many as a microbatch has where the call needs to know."""
    (arguments, keywords), specs = model._lamina.first_call
    parameters = list(inspect.signature(model.call).parameters)
    arguments = [
        False if at < len(parameters) and parameters[at] == "training" else each for at, each in enumerate(arguments)
    ]
    keywords = dict(keywords)
    if "training" not in parameters[: len(arguments)]:
        keywords["training"] = False
        if "training" not in model._lamina.first_call[0][1]:  # in its place among the others
            before = sum(name < "training" for name in keywords)
            at = len(tf.nest.flatten((arguments, {name: keywords[name] for name in sorted(keywords)[:before]})))
            specs = [*specs[:at], None, *specs[at:]]
    structure = (tuple(arguments), keywords)
    whole = [spec if spec is None or not spec.shape.rank else _of_any_batch(spec) for spec in specs]
    try:
        call = model._trace(structure, whole)
    except Exception:
        call = model._trace(structure, specs)
    return _names(parameters, structure, specs), call


def _of_any_batch(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _names(parameters: list[str], structure: Any, specs: list[tf.TensorSpec | None]) -> list[str]:
    arguments, keywords = structure
    named = [
        *((parameters[at] if at < len(parameters) else f"argument_{at}", each) for at, each in enumerate(arguments)),
        *sorted(keywords.items()),
    ]
    rest = iter(specs)
    names = []
    for name, argument in named:
        here = [next(rest) is not None for _ in tf.nest.flatten(argument)]
        names += [f"{name}_{at}" if sum(here) > 1 else name for at, tensor in enumerate(here) if tensor]
    return names


def _without_training(call: Call) -> Any:
    """Its operations, which make their results alone."""
    own = {operation.name for operation in call.operations}
    kept = type(call.definition)(versions=call.definition.versions, library=call.definition.library)
    kept.node.extend(node for node in call.definition.node if node.name in own or node.op == "Const")
    kept.node.extend(call.constants.values())
    names = {node.name for node in kept.node}
    for node in kept.node:
        inputs = [each for each in node.input if not each.startswith("^") or each[1:] in names]
        del node.input[:]
        node.input.extend(inputs)
    for nodes in (kept.node, *(function.node_def for function in kept.library.function)):
        for node in nodes:
            node.attr.pop(ATTRIBUTE, None)
    return kept


def _as_outputs(returned: Any) -> Any:
    """Results as a signature may return them: tensors by name, or in order."""
    if isinstance(returned, dict) and all(each is None or tf.is_tensor(each) for each in returned.values()):
        return {str(name): each for name, each in returned.items() if each is not None}
    tensors = [each for each in tf.nest.flatten(returned) if each is not None]
    return tensors[0] if len(tensors) == 1 else tensors
