# SPDX-License-Identifier: Apache-2.0
from lamina.optimizers import *  # noqa: F403
