# SPDX-License-Identifier: Apache-2.0
"""Dropout of what this rank has a part of: heads of attention, or features between two layers.

[Note: dropout of parts] Random numbers are drawn for all parts, on every rank of a TP_GROUP, and each uses those of its
own. So the numbers are those of the plain model. The generators of the ranks, which have the same state, stay alike:
dropout of what is whole is alike on all ranks, too.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lamina.tensor_parallel.heads import Share

_HEADS_AT = -3  # of queries, and of probabilities [..., heads, queries, keys]
_POSITIONS_AT = 1  # of states [samples, positions, features]


@dataclass
class Parts:
    """Parts of a module that are here: heads, or features between its layers.

    Attributes:
        team: the name of the ranks that have the others.
        positions: those of what it is given, where these lie in parts in this call.
        are_given: whether a layer has given parts, and the one that takes them has not begun.
    """

    heads: Share | None
    features: Share | None
    team: str
    are_given: bool = False
    positions: Share | None = None


class SlicedDropout(TorchFunctionMode):
    """Inside, dropout of what lies in parts is that of these parts."""

    def __init__(self, parts: Parts):
        super().__init__()
        self._parts = parts

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.dropout:
            return self._dropout(*args, **kwargs)
        if function is functional.scaled_dot_product_attention and self._parts.heads is not None:
            return self._attention(*args, **kwargs)
        return function(*args, **kwargs)

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        found = self._cut_of(input) if training and p > 0 else None
        if found is None:
            return functional.dropout(input, p, training, inplace)
        dimension, share = found
        shape = list(input.shape)
        shape[dimension] = share.all
        kept = functional.dropout(torch.ones(shape, dtype=input.dtype, device=input.device), p)
        kept = kept.narrow(dimension, share.first, share.own).clone()  # the rest is not kept for backwards
        return input.mul_(kept) if inplace else input * kept

    def _cut_of(self, input: torch.Tensor) -> tuple[int, Share] | None:
        """The dimension of which only a part is here, and that part."""
        heads, features = self._parts.heads, self._parts.features
        if heads is not None and input.dim() == 4 and input.shape[_HEADS_AT] == heads.own:
            return _HEADS_AT, heads
        if features is not None and self._parts.are_given and input.shape[-1:] == (features.own,):
            return -1, features
        positions = self._parts.positions
        if positions is not None and not self._parts.are_given and input.shape[_POSITIONS_AT] == positions.own:
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
        if dropout_p == 0:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            groups = query.shape[_HEADS_AT] // key.shape[_HEADS_AT]
            key, value = (each.repeat_interleave(groups, _HEADS_AT) for each in (key, value))
        # As torch computes it where no kernel of its own has dropout.
        factor = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
        scores = (query * factor) @ (key * factor).transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            is_kept = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if is_kept else scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value
