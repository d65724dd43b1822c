# SPDX-License-Identifier: Apache-2.0
"""lamina.tensorflow.core under the original's name."""

from lamina.tensorflow.core import *  # noqa: F403
