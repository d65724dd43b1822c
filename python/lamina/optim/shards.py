# SPDX-License-Identifier: Apache-2.0
"""Optimizers over parts of parameters: what they need of one."""

from torch import optim

from lamina.errors import said
from lamina.optim.registry import needs_of


def why_not_parts(optimizer: optim.Optimizer) -> str:
    """Says why an optimizer cannot update parts of parameters, "" where it can."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS):
        return said("measures-all")
    if needs_of(type(optimizer)) is not None:
        return ""
    return said(
        "needs-unknown", f'lamina.optim.register_functional_optimizer({kind}, needs="elements"), or needs="whole"'
    )
