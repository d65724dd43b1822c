# SPDX-License-Identifier: Apache-2.0
"""Support for Hugging Face's models: outputs that hooks collect, and caches."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from lamina.errors import UsageError

CAPTURING = "transformers.utils.output_capturing"  # that nobody has imported where nothing is to be collected


def collect(module: nn.Module, args: tuple, output: Any) -> None:
    """Hands what a module returned, which ran on another rank, to Hugging Face's hooks for `output_hidden_states` and
    the like: they put it where only the caller's thread finds it.

    Errors:
        UsageError: something is asked for that modules inside of this one return, out of sight here.
    """
    asked = sys.modules[CAPTURING]._active_collector.get()
    if not asked:
        return
    for hook in collectors(module):
        hook(module, args, output)
    for part in module.modules():
        for hook in collectors(part) if part is not module else ():
            if (key := inspect.getclosurevars(hook).nonlocals["key"]) in asked:
                raise UsageError(
                    f"{key} of a {type(part).__name__} inside a {type(module).__name__} that another rank owns cannot "
                    f"be collected: do without it, or place the {type(module).__name__} on the rank that calls it",
                    code="step-collected",
                )


def collectors(module: nn.Module) -> list[Callable[..., Any]]:
    """Hugging Face's own hooks of a module: they keep what it returns for those who ask for it."""
    return [hook for hook in module._forward_hooks.values() if is_collector(hook)]


def is_collector(hook: Any) -> bool:
    """True for such a hook, which `collect` calls for modules of other ranks."""
    return getattr(hook, "__module__", None) == CAPTURING


def cached(values: Iterable[Any], number: int) -> Iterator[Any]:
    """Layers of this number of the caches among these values: they have `keys` and `values` of earlier positions."""
    utils = sys.modules.get("transformers.cache_utils")
    for value in values if utils is not None else ():
        if isinstance(value, utils.EncoderDecoderCache):
            yield from cached((value.self_attention_cache, value.cross_attention_cache), number)
        elif isinstance(value, utils.Cache) and number < len(value.layers):
            yield value.layers[number]
