# SPDX-License-Identifier: Apache-2.0
"""Attention whose heads are cut over the ranks of a TP_GROUP.

Shapes: N samples, S positions, H features, h heads on this rank, D features of a head.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from lamina.errors import UsageError
from lamina.layers.basic import input_of, make_around, norms_in_parts, result_of
from lamina.layers.options import options_of, takes_options
from lamina.tensor_parallel import layers
from lamina.tensor_parallel.registry import DistributedModule

_HEADS, _POSITIONS = 1, 2  # of queries and keys [N, h, S, D]
_OPTIONS_OF_OPERATOR = (
    "cross_attention",
    "causal_mask_size",
    "window_size",
    "use_alibi",
    "alibi_bias_max",
    "rotary_dim",
    "scale",
    "attention_in_fp32",
)


@takes_options
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

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()
        options = options_of(DistributedAttentionLayer, args, kwargs)
        for name in ("num_attention_heads", "attention_head_size", "attention_dropout_prob", *_OPTIONS_OF_OPERATOR):
            setattr(self, name, options[name])
        hidden, inside = options["hidden_size"], self.num_attention_heads * self.attention_head_size
        self.query, self.key, self.value = (nn.Linear(hidden, inside, bias=options["qkv_bias"]) for _ in range(3))
        self.dense = nn.Linear(inside, hidden, bias=options["dense_bias"])
        make_around(self, options)

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
        normed = input_of(self, states, positions)
        seen = layers.ready(self, others[0]) if self.cross_attention else normed
        query, key, value = (
            layer(each).reshape(*each.shape[:2], -1, self.attention_head_size).transpose(1, 2)
            for layer, each in ((self.query, normed), (self.key, seen), (self.value, seen))
        )
        options = {name: getattr(self, name) for name in _OPTIONS_OF_OPERATOR}
        found = _attention(self, query, key, value, mask, **options)
        return result_of(self, states, self.dense(found.transpose(1, 2).flatten(2)))


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

    _lamina_has_heads = True

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
        longest = key.shape[_POSITIONS] if causal else None
        return _attention(
            self, query, key, value, attn_mask, causal_mask_size=longest, use_alibi=self.use_alibi, scale=scale
        )


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """The engine's, of the heads that a module has on this rank."""
    here = layers.heads_here(module)
    if here is not None and here.own == query.shape[_HEADS]:
        options |= {"first_head": here.first, "all_heads": here.all}
    dropout_p = module.attention_dropout_prob if module.training else 0.0
    return torch.ops.lamina.attention(query, key, value, mask, dropout_p=dropout_p, **options)
