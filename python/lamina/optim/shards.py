# SPDX-License-Identifier: Apache-2.0
"""Optimizers over parts of parameters: what they need of one."""

from torch import optim

from lamina.optim.registry import needs_of


def why_not_parts(optimizer: optim.Optimizer) -> str:
    """Says why an optimizer cannot update parts of parameters, "" where it can."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS):
        return (
            "it measures all parameters of a model at once, and a rank has a part of each: take an optimizer that "
            "updates each parameter by itself"
        )
    if needs_of(type(optimizer)) is not None:
        return ""
    return (
        f"a rank has a part of each parameter, and it is not known whether {kind} looks at more of one than the "
        "element that it updates. Say so before: "
        f'lamina.optim.register_functional_optimizer({kind}, needs="elements"), or needs="whole", with which each '
        "parameter is updated on one rank that has all of it"
    )
