# SPDX-License-Identifier: Apache-2.0
"""AutoGraph, which makes operations of Python's conditionals and loops where TensorFlow traces a function."""

from collections.abc import Callable
from typing import Any

from tensorflow.python.autograph.core import ag_ctx, config
from tensorflow.python.eager.polymorphic_function import autograph_util

from lamina.errors import Error

# AutoGraph converts whatever is called in a function that it converts: our own Python is as it is meant. Errors that
# it does not know it raises as another type.
config.CONVERSION_RULES = (config.DoNotConvert("lamina"), *config.CONVERSION_RULES)
Error.ag_pass_through = True


def converted(function: Callable[..., Any], autograph: bool) -> Callable[..., Any]:
    """A function as tf.function calls it while it traces it, whatever function calls it."""
    body = autograph_util.py_func_from_autograph(function) if autograph else function

    def call(*arguments: Any, **keywords: Any) -> Any:
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED if autograph else ag_ctx.Status.DISABLED):
            return body(*arguments, **keywords)

    return call
