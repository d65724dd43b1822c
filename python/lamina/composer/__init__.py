# SPDX-License-Identifier: Apache-2.0
"""Composer's names: the Trainer and its arguments, models, optimizers, schedules, callbacks and loggers."""
