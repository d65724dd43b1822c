# SPDX-License-Identifier: Apache-2.0
from composer.paths import others
from lamina.dist import *  # noqa: F403

__getattr__ = others(__name__)
