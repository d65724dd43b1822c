# SPDX-License-Identifier: Apache-2.0
"""Dropout of what this rank has a part of: heads of attention, or features between two layers.

[Note: dropout of parts] Random numbers are drawn for all parts, on every rank of a TP_GROUP, and each uses those of its
own. So the numbers are those of the plain model. The generators of the ranks, which have the same state, stay alike:
dropout of what is whole is alike on all ranks, too.

The mode that does so is one of a call: of the module around the layers. It goes along with calls of modules below that
one on other ranks (`calls_elsewhere.py`), and with what a checkpoint computes again (`recomputing`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from lamina.tensor_parallel import partial
from lamina.tensor_parallel.shares import Share

_HEADS_AT = -3  # of queries, and of probabilities [samples, heads, queries, keys]
_DIMENSIONS = 4  # of these
_POSITIONS_AT = 1  # of states [samples, positions, features]


@dataclass(frozen=True)
class Parts:
    """Parts of a module around sliced layers that are here.

    Attributes:
        heads: None where it has none.
        team: the name of the ranks that have the others.
        keys, all_keys: the heads of keys here, and how many there are.
    """

    heads: Share | None
    team: str
    keys: tuple[int, ...] = ()
    all_keys: int = 0


class State(NamedTuple):
    """The state of a call of a module around sliced layers.

    Attributes:
        given: this rank's parts of features that layers have given, while none has taken them.
        positions: those of what the module is given, where these lie in parts in this call.
    """

    given: tuple[Share, ...] = ()
    positions: Share | None = None


class SlicedDropout(TorchFunctionMode):
    """Inside, dropout of what lies in parts is that of these parts.

    Attributes:
        module: the one whose call it is.
        parts: that it has.
        state: of that call.
        copied: the last input of layers whose gradients are added over the ranks, its version then, and the copy that
            they were given.
    """

    def __init__(self, module: nn.Module, parts: Parts, state: State):
        super().__init__()
        self.module, self.parts, self.state = module, parts, state
        self.copied: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.dropout:
            return self._dropout(*args, **kwargs)
        if function is functional.scaled_dot_product_attention and self.parts.heads is not None:
            return self._attention(*args, **kwargs)
        return function(*args, **kwargs)

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        found = self._cut_of(input) if training and p > 0 else None
        if found is None:
            return functional.dropout(input, p, training, inplace)
        dimension, share = found
        given = torch.ones_like(input) if inplace else input
        dropped = torch.ops.lamina.tp_dropout(given, p, dimension, share.first, share.own, share.all)
        return input.mul_(dropped) if inplace else dropped

    def _cut_of(self, input: torch.Tensor) -> tuple[int, Share] | None:
        """The dimension of which only a part is here, and that part."""
        heads, (given, positions) = self.parts.heads, self.state
        if heads is not None and input.dim() == _DIMENSIONS and input.shape[_HEADS_AT] == heads.own:
            return _HEADS_AT, heads
        for features in given:
            if input.shape[-1:] == (features.own,):
                return -1, features
        if positions is not None and not given and input.shape[_POSITIONS_AT] == positions.own:
            return _POSITIONS_AT, positions
        return None

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        heads = self.parts.heads
        if dropout_p == 0 or query.dim() != _DIMENSIONS or query.shape[_HEADS_AT] != heads.own:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return torch.ops.lamina.tp_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, heads.first, heads.all
        )


def current() -> SlicedDropout | None:
    """The one that this thread is inside of."""
    for place in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(place)
        if isinstance(mode, SlicedDropout):
            return mode
    return None


@contextmanager
def left() -> Iterator[SlicedDropout | None]:
    """Inside, this thread is in none. Gives the one that it was in."""
    mode = current()
    if mode is None:
        yield None
        return
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    others = [each for each in modes if each is not mode]
    for each in reversed(others):
        _push_mode(each)
    try:
        yield mode
    finally:
        for _ in others:
            _pop_mode()
        for each in reversed(modes):
            _push_mode(each)


@contextmanager
def inside(module: nn.Module, parts: Parts, state: State) -> Iterator[None]:
    """Inside, dropout is that of a call of this module, and of no other one around it."""
    mode = SlicedDropout(module, parts, state)
    try:
        with left(), mode:
            yield
    finally:
        mode.copied = None


def recomputing(function: Callable) -> Callable:
    """`function`, which is called now and again in a backward: both times in the call that this thread is in now."""
    mode, added = current(), partial.added_here()
    if mode is None and not added:
        return function
    call = None if mode is None else (mode.module, mode.parts, mode.state)

    def run(*args: Any, **kwargs: Any) -> Any:
        is_known = call is None or current() is mode
        with partial.inside(added), nullcontext() if is_known else inside(*call):
            return function(*args, **kwargs)

    return run
