# SPDX-License-Identifier: Apache-2.0
"""BERT and RoBERTa, whose encoders have the same parts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lamina.layers.hugging_face.known import Known, activation, inputs_of_layers, rows_of
from lamina.layers.transformer import DistributedTransformer
from lamina.tensor_parallel.correspondence import from_original, to_original, with_names
from lamina.tensor_parallel.registry import UnfitError

_LAYER = (
    *(
        row
        for theirs, ours in (("attention", "attention"), ("crossattention", "cross_attention"))
        for row in (
            *rows_of(f"{theirs}.self.query", f"{ours}.query"),
            *rows_of(f"{theirs}.self.key", f"{ours}.key"),
            *rows_of(f"{theirs}.self.value", f"{ours}.value"),
            *rows_of(f"{theirs}.output.dense", f"{ours}.dense"),
            *rows_of(f"{theirs}.output.LayerNorm", f"{ours}.layernorm"),
        )
    ),
    *rows_of("intermediate.dense", "output.dense1"),
    *rows_of("output.dense", "output.dense2"),
    *rows_of("output.LayerNorm", "output.layernorm"),
)
ENCODER = with_names(_LAYER, "layer.*.", "seq_layers.*.")


def _options(encoder: nn.Module) -> dict[str, Any]:
    config = encoder.config
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        raise UnfitError("its scores know distances")
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings if config.is_decoder else None,
        "add_cross_attention": config.add_cross_attention,
    }


def _result(found: tuple[torch.Tensor | None, ...]) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=found[0])


_DROPOUTS = {
    "attention_dropout_prob": ("layer.*.attention.self.dropout", "layer.*.crossattention.self.dropout"),
    "hidden_dropout_prob": (
        "layer.*.attention.output.dropout",
        "layer.*.crossattention.output.dropout",
        "layer.*.output.dropout",
    ),
}
_KNOWN = Known(DistributedTransformer, ENCODER, _options, _DROPOUTS, inputs_of_layers, _result)
KNOWN = {"BertEncoder": _KNOWN, "RobertaEncoder": _KNOWN}
_IN_MODELS = tuple(
    row for inside in ("", "bert.", "roberta.") for row in with_names(ENCODER, f"{inside}encoder.", f"{inside}encoder.")
)


def translate_state_dict_to_hf(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> Mapping[str, Any]:
    """The state of a model whose encoder has become a DistributedTransformer, in the names that it had; other names
    stay as they are.

    Args:
        max_seq_len: no effect.
    """
    return to_original(_IN_MODELS, state_dict)


def translate_hf_state_dict_to_smdistributed(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reverse of `translate_state_dict_to_hf`."""
    return from_original(_IN_MODELS, state_dict)
