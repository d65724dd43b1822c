# SPDX-License-Identifier: Apache-2.0
"""TensorFlow, and the library of lamina's operators for it, which `make tensorflow` builds."""

import importlib.util
from pathlib import Path

from lamina import _lamina  # noqa: F401 -- the engine, which the library of operators finds in the process

HOW = "run `make tensorflow` in lamina's repository, and start with build/tensorflow/venv/bin/python"

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(f"lamina.tensorflow needs TensorFlow 2.21: {HOW}") from error

# Scripts that set TF_USE_LEGACY_KERAS mean Keras 2 by `tf.keras`.
OF_KERAS_2 = tf.keras.Model.__module__.startswith("tf_keras")
if OF_KERAS_2:
    import tf_keras as keras
else:
    import keras as keras


def _load_operators():
    found = importlib.util.find_spec("lamina_operators")
    if found is None:
        raise ImportError(f"lamina's operators for TensorFlow are not built: {HOW}")
    folder = Path(found.submodule_search_locations[0])
    built_with = (folder / "built_with").read_text().strip()
    if built_with != tf.__version__:
        raise ImportError(
            f"lamina's operators are built for TensorFlow {built_with}, and this is {tf.__version__}: {HOW}"
        )
    return tf.load_op_library(str(folder / "liblamina_tensorflow.so"))


OPERATORS = _load_operators()
