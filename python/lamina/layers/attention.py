# SPDX-License-Identifier: Apache-2.0
"""Attention whose heads are cut over the ranks of a TP_GROUP.

Shapes: N samples, S positions, H features, h heads on this rank, D features of a head.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from lamina.errors import UsageError, refusal
from lamina.layers.basic import DistributedLayerNorm, added, begin_normal, norms_in_parts
from lamina.tensor_parallel import layers
from lamina.tensor_parallel.registry import DistributedModule

_HEADS, _POSITIONS = 1, 2  # of queries and keys [N, h, S, D]
_BIAS_MAX = 8  # by default


class DistributedAttentionLayer(DistributedModule):
    """Attention, and what is around it: norms, dropout, and the sum with what it is given.

    Args:
        num_attention_heads, attention_head_size, hidden_size: of the whole.
        attention_dropout_prob: of dropout of the attention's probabilities.
        hidden_dropout_prob: of dropout of the result, before it is added.
        layernorm_epsilon: of the norms.
        initializer_range: the standard deviation of weights, with use_normal_initialization.
        use_normal_initialization: whether weights begin with normal values and biases with zeros, else as torch's.
        cross_attention: whether keys and values come from other states. These have no order: what has to do with places
            does not count then.
        causal_mask_size: the longest sequence, of which each position sees those before it; None: it sees all.
        pre_layernorm, post_layernorm: whether there is a norm of the input, and one of the result.
        use_alibi, alibi_bias_max: whether scores fall with the distance (ALiBi), and by how much the first head's do.
        attention_in_fp32: whether scores and probabilities are float32 where the states are half.
        fp32_residual_addition: whether the sum is.
        window_size: how many positions, of itself and before it, a position sees with causal_mask_size; None: all.
        scale: what scores are multiplied by; None for 1 / sqrt(attention_head_size).
        qkv_bias, dense_bias: whether queries, keys and values have biases, and the last Linear.
        rotary_dim: how many features of each head turn with the position, in pairs of neighbours, as GPT-J has it.
        add_input: whether the result is added to what the layer is given.
    """

    slicing_plan: ClassVar[Mapping[str, str]] = {
        "query": "colwise_of_ready",
        "key": "colwise_of_ready",
        "value": "colwise_of_ready",
        "dense": "rowwise",
    }

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: float = _BIAS_MAX,
        attention_in_fp32: bool = False,
        fp32_residual_addition: bool = False,
        window_size: int | None = None,
        scale: float | None = None,
        qkv_bias: bool = True,
        dense_bias: bool = True,
        rotary_dim: int | None = None,
        add_input: bool = True,
    ):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = num_attention_heads, attention_head_size
        self.cross_attention, self.causal_mask_size, self.window_size = cross_attention, causal_mask_size, window_size
        self.use_alibi, self.alibi_bias_max, self._all_heads = use_alibi, alibi_bias_max, num_attention_heads
        self.attention_dropout_prob, self.scale = attention_dropout_prob, scale
        self.rotary_dim, self.add_input = rotary_dim, add_input
        self.attention_in_fp32, self.fp32_residual_addition = attention_in_fp32, fp32_residual_addition
        inside = num_attention_heads * attention_head_size
        self.query, self.key, self.value = (nn.Linear(hidden_size, inside, bias=qkv_bias) for _ in range(3))
        self.dense = nn.Linear(inside, hidden_size, bias=dense_bias)
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon) if pre_layernorm else None
        self.layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon) if post_layernorm else None
        if use_normal_initialization:
            begin_normal(self, initializer_range)

    @property
    def positions_plan(self) -> Mapping[str, str]:
        return {**self.slicing_plan, "dense": "rowwise_to_positions"} | norms_in_parts(self)

    def forward(self, inputs: tuple[torch.Tensor | None, ...], positions: int | None = None) -> torch.Tensor:
        """
        Args:
            inputs: states [N, S, H] and a mask, or None, that is added to scores: [N, 1, 1, S]. With cross_attention
                states, other states, and a mask of these.
            positions: how many there are, where the states here are those of a part of them.

        Returns:
            [N, S, H].

        Errors:
            UsageError: a mask of booleans, or more positions than causal_mask_size.
        """
        states, *others, mask = inputs
        normed = states if self.pre_layernorm is None else self.pre_layernorm(states)
        normed = layers.ready(self, normed, positions)
        seen = layers.ready(self, others[0]) if self.cross_attention else normed
        query, key, value = (
            layer(each).reshape(*each.shape[:2], -1, self.attention_head_size).transpose(1, 2)
            for layer, each in ((self.query, normed), (self.key, seen), (self.value, seen))
        )
        if self.rotary_dim is not None and not self.cross_attention:
            query, key = _turned(query, self.rotary_dim), _turned(key, self.rotary_dim)
        found = self._attended(query, key, value, mask)
        output = self.dropout(self.dense(found.transpose(1, 2).flatten(2)))
        if self.add_input:
            output = added(states, output, self.fp32_residual_addition)
        return output if self.layernorm is None else self.layernorm(output)

    def _attended(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        dtype = value.dtype
        if self.attention_in_fp32 and dtype.itemsize < torch.float32.itemsize:
            query, key, value = query.float(), key.float(), value.float()
        is_causal = self.causal_mask_size is not None and not self.cross_attention
        if is_causal and key.shape[_POSITIONS] > self.causal_mask_size:
            raise refusal("too-many-positions", key.shape[_POSITIONS], self.causal_mask_size)
        slopes = None
        if self.use_alibi and not self.cross_attention:
            here = layers.heads_here(self)
            slopes = _slopes(self._all_heads, self.alibi_bias_max)
            slopes = slopes if here is None else slopes[here.first : here.first + here.own]
        mask = _bias(query, key, mask, is_causal, slopes, self.window_size)
        dropout = self.attention_dropout_prob if self.training else 0.0
        is_causal = is_causal and mask is None
        attend = functional.scaled_dot_product_attention
        return attend(query, key, value, mask, dropout, is_causal, scale=self.scale).to(dtype)


class FlashAttentionLayer(nn.Module):
    """Attention alone, by torch's fastest kernel for it.

    Args:
        attention_dropout_prob: of dropout of the probabilities.
        attention_head_size: with scale_attention_scores; None for that of what it is given.
        scale_attention_scores: whether scores are divided by the square root of that size.
        scale_attn_by_layer_idx, layer_idx: whether they are divided by the layer's number, too, counted from 1 on.
        scale: what they are multiplied by, in the place of all that; None for it.
        triton_flash_attention: no effect.
        use_alibi: whether scores fall with the distance (ALiBi).
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ):
        super().__init__()
        if scale_attn_by_layer_idx and layer_idx is None:
            raise UsageError("scale_attn_by_layer_idx needs layer_idx", code="tp-layer")
        self.attention_dropout_prob, self.attention_head_size = attention_dropout_prob, attention_head_size
        self.scale_attention_scores, self.scale = scale_attention_scores, scale
        self.divisor = layer_idx + 1 if scale_attn_by_layer_idx and layer_idx is not None else 1
        self.use_alibi = use_alibi

    def forward(self, qkv: torch.Tensor, attn_mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        """
        Args:
            qkv: queries, keys and values, [N, S, 3, h, D].
            attn_mask: what is added to scores; None for nothing.
            causal: whether a position sees those before it alone.

        Returns:
            [N, h, S, D].
        """
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        scale = self.scale
        if scale is None:
            size = self.attention_head_size or qkv.shape[-1]
            scale = (1 / math.sqrt(size) if self.scale_attention_scores else 1.0) / self.divisor
        slopes = _slopes(query.shape[_HEADS], _BIAS_MAX) if self.use_alibi else None
        mask = _bias(query, key, attn_mask, causal, slopes)
        dropout = self.attention_dropout_prob if self.training else 0.0
        attend = functional.scaled_dot_product_attention
        return attend(query, key, value, mask, dropout, causal and mask is None, scale=scale)


def _bias(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    slopes: torch.Tensor | None,
    window: int | None = None,
) -> torch.Tensor | None:
    """Numbers that are added to scores, [N or 1, h or 1, S or 1, S]; None for none but those of `is_causal`.

    Args:
        mask: some of them, or None.
        is_causal: whether a position sees those before it alone.
        slopes: by how much scores of each head fall with the distance; None for not at all.
        window: how many positions, of itself and before it, a causal one sees; None for all.

    Errors:
        UsageError: a mask of booleans.
    """
    if mask is not None:
        if mask.dtype == torch.bool:
            raise refusal("mask-of-booleans")
        mask = mask.to(query.dtype)
    queries, keys = query.shape[_POSITIONS], key.shape[_POSITIONS]
    has_window = is_causal and window is not None and window < keys
    if slopes is None and not has_window and not (is_causal and mask is not None):
        return mask
    places = torch.arange(keys, device=query.device)
    distance = places[keys - queries :, None] - places
    bias = query.new_zeros(1, 1, queries, keys)
    if slopes is not None:
        bias = bias - slopes.to(query)[:, None, None] * distance.abs()
    if is_causal:
        unseen = (distance < 0) | (distance >= window) if has_window else distance < 0
        bias = bias.masked_fill(unseen, -math.inf)
    return bias if mask is None else bias + mask


def _turned(heads: torch.Tensor, features: int) -> torch.Tensor:
    """Queries or keys whose first features are turned by their position: each pair of neighbours by another angle."""
    places = torch.arange(heads.shape[_POSITIONS], device=heads.device, dtype=torch.float32)
    pairs = torch.arange(0, features, 2, device=heads.device, dtype=torch.float32)
    angles = places[:, None] * (1.0 / 10000 ** (pairs / features))
    sine, cosine = (each.repeat_interleave(2, -1).to(heads.dtype) for each in (angles.sin(), angles.cos()))
    turning, rest = heads[..., :features], heads[..., features:]
    across = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    return torch.cat((turning * cosine + across * sine, rest), -1)


def _slopes(heads: int, most: float) -> torch.Tensor:
    """ALiBi's slopes, of the first head the steepest: those of a power of two, of which others take every second."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** (-most * (place + 1) / power) for place in range(power)]
    return torch.tensor(slopes if power == heads else [*slopes[1::2], *slopes[::2]][:heads])
