# SPDX-License-Identifier: Apache-2.0
from lamina.dist import *  # noqa: F403
