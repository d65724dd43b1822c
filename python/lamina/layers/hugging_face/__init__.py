# SPDX-License-Identifier: Apache-2.0
"""Modules of transformers, and what they become: see [Note: slicing plan] for those that stay what they are."""

from torch import nn

from lamina.tensor_parallel.registry import Registration


def registration_of(module: nn.Module) -> Registration | None:
    """Returns what becomes of a module of transformers; None for all others."""
    return None
