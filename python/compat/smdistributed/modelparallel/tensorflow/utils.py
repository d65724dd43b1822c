# SPDX-License-Identifier: Apache-2.0
"""lamina.tensorflow.utils under the original's name."""

from lamina.tensorflow.utils import receive_checkpoint_files as receive_checkpoint_files
from lamina.tensorflow.utils import send_checkpoint_files as send_checkpoint_files
