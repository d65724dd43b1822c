# SPDX-License-Identifier: Apache-2.0
from lamina.trainer.monitors import (
    EarlyStopper,
    LRMonitor,
    MemoryMonitor,
    OptimizerMonitor,
    SpeedMonitor,
    ThresholdStopper,
)

__all__ = ["EarlyStopper", "LRMonitor", "MemoryMonitor", "OptimizerMonitor", "SpeedMonitor", "ThresholdStopper"]
