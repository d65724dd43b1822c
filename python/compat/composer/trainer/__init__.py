# SPDX-License-Identifier: Apache-2.0
from composer.paths import offer
from lamina.composer import trainer
from lamina.composer.trainer import Trainer

offer(__name__, trainer=trainer)

__all__ = ["Trainer"]
