# SPDX-License-Identifier: Apache-2.0
"""lamina.tensorflow under the name of `smdistributed.modelparallel.tensorflow`."""

import lamina.tensorflow
from lamina.tensorflow import *  # noqa: F403


def __getattr__(name: str) -> object:
    return getattr(lamina.tensorflow, name)
