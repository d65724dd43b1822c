# SPDX-License-Identifier: Apache-2.0
from lamina.trainer import Trainer

__all__ = ["Trainer"]
