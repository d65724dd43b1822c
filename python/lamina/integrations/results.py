# SPDX-License-Identifier: Apache-2.0
"""Results of step functions, in the form in which a loop expects those of a whole batch."""

from typing import Any

from lamina.pipeline.output import StepOutput
from lamina.util import pytree


def joined(result: Any) -> Any:
    """The result of a step function with tensors in the places of StepOutputs: the mean of those without axes (losses),
    else the whole batch again. What is no tensor stays a list of one value per microbatch."""
    if isinstance(result, StepOutput):
        return result.reduce_mean() if result.outputs[0].dim() == 0 else result.concat()
    children = pytree.children(result)
    if children is None or isinstance(result, (set, frozenset)):
        return result
    return pytree.rebuild(result, [joined(value) for _, value in children])
