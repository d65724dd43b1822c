# SPDX-License-Identifier: Apache-2.0
from composer.optim.scheduler import *  # noqa: F403
from composer.optim.scheduler import __all__ as _schedulers
from composer.paths import offer, others
from lamina.composer import optimizers
from lamina.composer.optimizers import DecoupledAdamW, DecoupledSGDW

offer(__name__, decoupled_weight_decay=optimizers)
__getattr__ = others(__name__)

__all__ = ["DecoupledAdamW", "DecoupledSGDW", *_schedulers]
