# SPDX-License-Identifier: Apache-2.0
from composer.paths import offer, others
from lamina.composer import monitors
from lamina.composer.monitors import (
    EarlyStopper,
    LRMonitor,
    MemoryMonitor,
    OptimizerMonitor,
    SpeedMonitor,
    ThresholdStopper,
)

offer(__name__, early_stopper=monitors, lr_monitor=monitors, memory_monitor=monitors, optimizer_monitor=monitors)
offer(__name__, speed_monitor=monitors, threshold_stopper=monitors)
__getattr__ = others(__name__)

__all__ = ["EarlyStopper", "LRMonitor", "MemoryMonitor", "OptimizerMonitor", "SpeedMonitor", "ThresholdStopper"]
