# SPDX-License-Identifier: Apache-2.0
from lamina.amp import *  # noqa: F403
