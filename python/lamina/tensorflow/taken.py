# SPDX-License-Identifier: Apache-2.0
"""Gradients that a function takes while TensorFlow traces it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.python.eager import imperative_grad
from tensorflow.python.ops import gradients_util

from lamina.tensorflow.installed import tf


@contextlib.contextmanager
def noted(note: Callable[[tf.Tensor], None]) -> Iterator[None]:
    """Has `note` called with each that a tape, or tf.gradients, makes."""
    of_tape, of_graph = imperative_grad.imperative_grad, gradients_util._GradientsHelper

    def noting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            made = plain(*arguments, **keywords)
            for each in tf.nest.flatten(made, expand_composites=True):
                if tf.is_tensor(each):
                    note(each)
            return made

        return call

    imperative_grad.imperative_grad, gradients_util._GradientsHelper = noting(of_tape), noting(of_graph)
    try:
        yield
    finally:
        imperative_grad.imperative_grad, gradients_util._GradientsHelper = of_tape, of_graph
