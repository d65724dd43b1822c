# SPDX-License-Identifier: Apache-2.0
from composer.optim.scheduler import *  # noqa: F403
from composer.optim.scheduler import __all__ as _schedulers
from lamina.trainer.optimizers import DecoupledAdamW, DecoupledSGDW

__all__ = ["DecoupledAdamW", "DecoupledSGDW", *_schedulers]
