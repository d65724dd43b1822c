# SPDX-License-Identifier: Apache-2.0
"""`lamina plan --model` of models of TensorFlow: their items, without other ranks."""

from collections.abc import Callable
from typing import Any

from lamina.errors import UsageError
from lamina.job import lifetime
from lamina.planning import others
from lamina.planning.cli import arguments
from lamina.tensorflow.beginning import init
from lamina.tensorflow.installed import tf
from lamina.tensorflow.model import CutModel
from lamina.util.told import tell


def plan_of(build: Callable[[], Any], inputs: list[str]) -> list[dict[str, Any]]:
    """The rows of a plan for the model that `build` returns, called with `inputs`, in which tf is known.

    Errors:
        UsageError: it returns no DistributedModel, or an input is no Python. What `build` and the call raise.
    """
    if not inputs:
        raise UsageError("a model of TensorFlow is planned by its call: say with --input what it is called with")
    init(partitions=1, microbatches=1)
    try:
        model = build()
        if not isinstance(model, CutModel):
            raise UsageError(f"--model: the callable returned no DistributedModel, but {type(model).__name__}")
        given, named = arguments(inputs, tf=tf)
        tell("times count operations and variables, and memory has no activations")
        return model.plan_rows(*given, **named)
    finally:
        lifetime.shutdown()


others.add(plan_of)
