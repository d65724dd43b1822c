# SPDX-License-Identifier: Apache-2.0
"""Variables of the model that other ranks own: objects without a value here."""

from collections.abc import Callable
from typing import Any

from tensorflow.python.ops import gen_resource_variable_ops, resource_variable_ops

from lamina.errors import UsageError
from lamina.tensorflow.installed import tf

_READS = ("_read_variable_op", "sparse_read", "gather_nd")
_WRITES = ("assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update", "scatter_nd_update")


def of_tensorflow(variable: Any) -> tf.Variable:
    """TensorFlow's variable in one of Keras's."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def give_back(variable: tf.Variable, name: str, owner: int, traces: Callable[[], bool]) -> None:
    """Gives its memory back. From then on, whoever reads or writes it is told which rank has it.

    Args:
        variable: an eager one.
        name: the model's for it.
        owner: the rank.
        traces: says that the model's call is traced, which reads no values.
    """
    words = f"variable {name} is on rank {owner}, and has no value here"
    plain = type(variable)
    for method in (*_READS, *_WRITES):
        if hasattr(plain, method):
            setattr(variable, method, _refused(getattr(plain, method), variable, words, traces))
    variable._serialize_to_tensors = dict  # a checkpoint of this rank has no value of it
    variable._restore_from_tensors = lambda _: variable
    # Graphs that have captured the handle go on to hold its memory, so that its value is nothing from now on. Functions
    # that are traced later find another handle, of nothing, whose name says why.
    gen_resource_variable_ops.assign_variable_op(variable.handle, tf.zeros([0], variable.dtype))
    variable._handle = resource_variable_ops._variable_handle_from_shape_and_dtype(
        variable.shape, variable.dtype, None, words.replace(" ", "_").replace(",", ""), graph_mode=False
    )


def _refused(method: Any, variable: tf.Variable, words: str, traces: Callable[[], bool]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        if traces():
            return method(variable, *arguments, **keywords)
        raise UsageError(
            f"{words}: model.variables are those of this rank; smp.broadcast or a result of a step function brings "
            "others the value"
        )

    return call
