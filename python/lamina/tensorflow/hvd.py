# SPDX-License-Identifier: Apache-2.0
"""Horovod's names, over the copies of the model that the job has."""

from collections.abc import Sequence
from typing import Any

from lamina.errors import UsageError
from lamina.tensorflow import copies, graphs, running
from lamina.tensorflow.installed import tf
from lamina.tensorflow.variables import of_tensorflow

Average, Sum = "Average", "Sum"
_HINTS = ("device_dense", "device_sparse", "compression", "name")


def allreduce(tensor: Any, average: bool | None = None, op: str | None = None, **hints: Any) -> Any:
    """The mean, or the sum, of a tensor or slices over the copies of the model; collective over them. Gradients that
    `accumulate()` gives are means already, and None is None.

    Args:
        tensor: of numbers that have gradients.
        average: False for the sum.
        op: `Average`, or `Sum`.
        **hints: of Horovod's, which change no result.

    Errors:
        UsageError: another operation or option, integers, or in a step function.
    """
    for name in hints:
        if name not in _HINTS:
            raise UsageError(f"hvd.allreduce() takes no {name} here")
    if op not in (None, Average, Sum) or (op is not None and average is not None):
        raise UsageError("hvd.allreduce() takes average, or one of the operations Average and Sum")
    if running.inside():
        raise UsageError(
            "hvd.allreduce() in a step function, of a microbatch's tensors: take it of what accumulate() gives, outside"
        )
    copy = copies.of_job()
    if tensor is None or copy.count == 1:
        return tensor
    of_all = getattr(tensor, "_lamina_of_all_copies", False)
    if not isinstance(tensor, tf.IndexedSlices):
        tensor = tf.convert_to_tensor(tensor)
    if not graphs.has_gradients(tensor):
        raise UsageError(f"hvd.allreduce() of {tensor.dtype.name}: cast it to a floating type")
    mean = tensor if of_all else copy.mean(tensor)
    if op != Sum and average is not False:
        return mean
    if isinstance(mean, tf.IndexedSlices):
        return tf.IndexedSlices(mean.values * copy.count, mean.indices, mean.dense_shape)
    return mean * copy.count


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Gives the variables of all copies of the model the values of one; collective over them. Each rank says those that
    it has.

    Errors:
        UsageError: there is no such copy, or in a step function.
    """
    copy = copies.of_job()
    if not 0 <= root_rank < copy.count:
        raise UsageError(
            f"hvd.broadcast_variables(): there is no copy {root_rank} of the model, only 0 to {copy.count - 1}"
        )
    if running.inside():
        raise UsageError("hvd.broadcast_variables() in a step function: call it outside")
    copy.take_values([of_tensorflow(each) for each in variables], root_rank)
