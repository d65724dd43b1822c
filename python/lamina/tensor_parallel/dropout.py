# SPDX-License-Identifier: Apache-2.0
"""Dropout of attention of which this rank has some heads.

[Note: dropout of heads] Random numbers are drawn for all heads, on every rank of a TP_GROUP, and each uses those of its
own. So the numbers are those of the plain model. The generators of the ranks, which have the same state, stay alike:
dropout of what is whole is alike on all ranks, too.
"""

import math
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_HEADS_AT = -3  # of queries, and of probabilities [..., heads, queries, keys]


class HeadDropout(TorchFunctionMode):
    """Inside, dropout of probabilities of attention is that of these heads.

    Args:
        own: how many heads are here.
        first: the first of them.
        all: how many there are on all ranks.
    """

    def __init__(self, own: int, first: int, all: int):
        super().__init__()
        self._own, self._first, self._all = own, first, all

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.dropout:
            return self._dropout(*args, **kwargs)
        if function is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return function(*args, **kwargs)

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        drops = training and p > 0 and input.dim() == 4 and input.shape[_HEADS_AT] == self._own
        if not drops:
            return functional.dropout(input, p, training, inplace)
        shape = list(input.shape)
        shape[_HEADS_AT] = self._all
        kept = functional.dropout(torch.ones(shape, dtype=input.dtype, device=input.device), p)
        kept = kept.narrow(_HEADS_AT, self._first, self._own)
        return input.mul_(kept) if inplace else input * kept

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
