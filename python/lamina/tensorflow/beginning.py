# SPDX-License-Identifier: Apache-2.0
"""The beginning of a job of TensorFlow's."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from lamina import _lamina
from lamina.job import current, lifetime
from lamina.tensorflow import copies, exchange, interrupts, norms, older_keras, running, taken
from lamina.tensorflow import gradients as _gradients  # noqa: F401 -- registers those of our operators
from lamina.tensorflow.installed import tf
from lamina.tensorflow.model import ModelOfJob
from lamina.util.told import tell


def init(config: Mapping[str, Any] | None = None, /, **keys: Any) -> None:
    """Starts lamina in this process; every process of the job calls it.

    Args:
        config: the keys of docs/configuration.md, either bare or as `{"enabled": ..., "parameters": {...}}`.
        **keys: the same as keyword arguments.

    Errors:
        ConfigError: wrong keys, or those of PyTorch alone.
    """
    lifetime.start(config, keys, _lamina.of_graphs)
    if current.job().own_if_any(exchange.Exchanges) is not None:
        return
    _share_cores()
    for kind in norms.optimizers():
        kind.get_gradients = _get_gradients
    norms.spread()
    taken.note()
    older_keras.add()
    exchange.of_job()  # ranks number graphs alike: those of exchanges come first
    copies.of_job()
    interrupts.watch()


def _share_cores() -> None:
    """Has TensorFlow's operations compute on this rank's share of the cores, unless the script or the environment says
    on how many, or has begun to compute."""
    threads = tf.config.threading
    if threads.get_intra_op_parallelism_threads() or "TF_NUM_INTRAOP_THREADS" in os.environ:
        return
    try:
        threads.set_intra_op_parallelism_threads(torch.get_num_threads())
    except RuntimeError:
        tell("TensorFlow has computed before smp.init(): each of its operations uses all cores of the machine")


def _get_gradients(_: Any, loss: tf.Tensor, params: list[Any]) -> list[Any]:
    """The gradients of a loss by this rank's variables, in a step function; None for those that it does not depend
    on."""
    running.current("optimizer.get_gradients()")
    handles = [each.handle for each in params]
    hidden = current.job().own(ModelOfJob).hidden
    return tf.gradients(loss, [*handles, hidden.handle])[:-1]
