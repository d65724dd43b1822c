# SPDX-License-Identifier: Apache-2.0
"""GPT-J."""

from collections.abc import Mapping
from typing import Any

from lamina.layers.hugging_face.known import Call, activation, hidden_of, rows_of
from lamina.layers.hugging_face.language_models import from_theirs, known, rows_of_model, to_theirs

BLOCK = (
    *rows_of("ln_1", "layernorm"),
    *rows_of("attn.q_proj", "attention.query"),
    *rows_of("attn.k_proj", "attention.key"),
    *rows_of("attn.v_proj", "attention.value"),
    *rows_of("attn.out_proj", "attention.dense"),
    *rows_of("mlp.fc_in", "output.dense1"),
    *rows_of("mlp.fc_out", "output.dense2"),
)
MODEL = rows_of_model(BLOCK)
_DROPOUTS = {
    "attention_dropout_prob": ("attn.attn_dropout",),
    "hidden_dropout_prob": ("attn.resid_dropout", "mlp.dropout"),
}


def options(config: Any) -> dict[str, Any]:
    """The arguments of DistributedTransformerLMHead for a configuration."""
    size = config.n_embd // config.n_head
    return {
        "num_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "attention_head_size": size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_inner if config.n_inner is not None else 4 * config.n_embd,
        "vocab_size": config.vocab_size,
        "num_positions": 0,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.n_positions,
        "pre_layernorm": True,
        "post_layernorm": False,
        "attention_in_fp32": True,
        "qkv_bias": False,
        "dense_bias": False,
        "rotary_dim": config.rotary_dim or size,
        "parallel_attn_output": True,
    }


def _inputs(call: Call) -> Any:
    words, mask, labels = call.taken("input_ids", "attention_mask", "labels")
    return words, hidden_of(mask), None, None, labels


KNOWN = known(("GPTJForCausalLM", "GPTJModel"), MODEL, options, _DROPOUTS, _inputs)


def translate_state_dict_to_hf_gptj(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> Mapping[str, Any]:
    """A state of a model that has become DistributedTransformerLMHead, in the names that it had.

    Args:
        max_seq_len: no effect: causal masks are no part of states.
    """
    return to_theirs(MODEL, state_dict)


def translate_hf_state_dict_to_smdistributed_gptj(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reverse of `translate_state_dict_to_hf_gptj`."""
    return from_theirs(MODEL, state_dict)
