# SPDX-License-Identifier: Apache-2.0
from composer.paths import offer
from lamina.trainer import Trainer, trainer

offer(__name__, trainer=trainer)

__all__ = ["Trainer"]
