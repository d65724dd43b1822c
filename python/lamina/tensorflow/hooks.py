# SPDX-License-Identifier: Apache-2.0
"""Functions of the script's that run once the model is cut."""

from collections.abc import Callable
from typing import Any

from lamina.errors import UsageError
from lamina.job import current
from lamina.tensorflow.model import ModelOfJob


def register_post_partition_hook(hook: Callable[[], Any]) -> Callable[[], Any]:
    """Has a function run on every rank in the first step, when each variable has its owner and nothing was computed:
    eagerly, without arguments, in the order of registration. A decorator: returns the function.

    Errors:
        UsageError: the model is cut already.
    """
    state = current.job().own(ModelOfJob)
    if state.owners:
        raise UsageError("register_post_partition_hook() once the model is cut: register it before the first step")
    state.hooks.append(hook)
    return hook
