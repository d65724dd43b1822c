# SPDX-License-Identifier: Apache-2.0
"""GPT-Neo."""

from collections.abc import Mapping
from typing import Any

from lamina.layers.hugging_face.known import activation, rows_of
from lamina.layers.hugging_face.language_models import from_theirs, inputs, known, rows_of_model, to_theirs

BLOCK = (
    *rows_of("ln_1", "attention.pre_layernorm"),
    *rows_of("attn.attention.q_proj", "attention.query"),
    *rows_of("attn.attention.k_proj", "attention.key"),
    *rows_of("attn.attention.v_proj", "attention.value"),
    *rows_of("attn.attention.out_proj", "attention.dense"),
    *rows_of("ln_2", "output.pre_layernorm"),
    *rows_of("mlp.c_fc", "output.dense1"),
    *rows_of("mlp.c_proj", "output.dense2"),
)
MODEL = rows_of_model(BLOCK)
_DROPOUTS = {
    "attention_dropout_prob": ("attn.attention.attn_dropout",),
    "hidden_dropout_prob": ("attn.attention.resid_dropout", "mlp.dropout"),
}


def options(config: Any) -> dict[str, Any]:
    """The arguments of DistributedTransformerLMHead for a configuration."""
    return {
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "attention_head_size": config.hidden_size // config.num_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": float(config.attention_dropout),
        "hidden_dropout_prob": float(config.resid_dropout),
        "embedding_dropout_prob": float(config.embed_dropout),
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings,
        "pre_layernorm": True,
        "post_layernorm": False,
        "attention_in_fp32": True,
        "scale": 1.0,
        "qkv_bias": False,
        "window_size": [config.window_size if kind == "local" else None for kind in config.attention_layers],
    }


KNOWN = known(("GPTNeoForCausalLM", "GPTNeoModel"), MODEL, options, _DROPOUTS, inputs)


def translate_state_dict_to_hf_gptneo(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> Mapping[str, Any]:
    """A state of a model that has become DistributedTransformerLMHead, in the names that it had.

    Args:
        max_seq_len: no effect: causal masks are no part of states.
    """
    return to_theirs(MODEL, state_dict)


def translate_hf_state_dict_to_smdistributed_gptneo(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reverse of `translate_state_dict_to_hf_gptneo`."""
    return from_theirs(MODEL, state_dict)
