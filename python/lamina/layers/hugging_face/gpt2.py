# SPDX-License-Identifier: Apache-2.0
"""GPT-2."""

from collections.abc import Mapping
from typing import Any

import torch

from lamina.layers.hugging_face.known import Call, Known, activation, hidden_of, inputs_of_layers, like, rows_of
from lamina.layers.hugging_face.language_models import from_theirs, known, rows_of_model, to_theirs
from lamina.layers.transformer import DistributedTransformerLayer
from lamina.tensor_parallel.correspondence import Row, from_original, to_original
from lamina.tensor_parallel.registry import Hook, UnfitError

_PARTS = ("query", "key", "value")
BLOCK = (
    *rows_of("ln_1", "attention.pre_layernorm"),
    *(
        Row(f"attn.c_attn.{kind}", tuple(f"attention.{part}.{kind}" for part in _PARTS), kind == "weight")
        for kind in ("weight", "bias")
    ),
    *rows_of("attn.c_proj", "attention.dense", transposed=True),
    *rows_of("ln_cross_attn", "cross_attention.pre_layernorm"),
    *rows_of("crossattention.q_attn", "cross_attention.query", transposed=True),
    *(
        Row(
            f"crossattention.c_attn.{kind}",
            tuple(f"cross_attention.{part}.{kind}" for part in _PARTS[1:]),
            kind == "weight",
        )
        for kind in ("weight", "bias")
    ),
    *rows_of("crossattention.c_proj", "cross_attention.dense", transposed=True),
    *rows_of("ln_2", "output.pre_layernorm"),
    *rows_of("mlp.c_fc", "output.dense1", transposed=True),
    *rows_of("mlp.c_proj", "output.dense2", transposed=True),
)
MODEL = rows_of_model(BLOCK)
_DROPOUTS = {
    "attention_dropout_prob": ("attn.attn_dropout", "crossattention.attn_dropout"),
    "hidden_dropout_prob": ("attn.resid_dropout", "crossattention.resid_dropout", "mlp.dropout"),
}


def layer_options(config: Any) -> dict[str, Any]:
    """The arguments of the layers of a model with this configuration, but their scale."""
    return {
        "num_attention_heads": config.n_head,
        "attention_head_size": config.n_embd // config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_inner if config.n_inner is not None else 4 * config.n_embd,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.n_positions,
        "add_cross_attention": config.add_cross_attention,
        "pre_layernorm": True,
        "post_layernorm": False,
        "attention_in_fp32": config.reorder_and_upcast_attn,
    }


def block_options(config: Any, layer_idx: int | None) -> dict[str, Any]:
    scale = None if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        if layer_idx is None:
            raise UnfitError("it does not know its number, which scores are divided by")
        scale = (scale or (config.n_embd // config.n_head) ** -0.5) / (layer_idx + 1)
    return layer_options(config) | {"scale": scale}


def model_options(config: Any) -> dict[str, Any]:
    if config.scale_attn_by_inverse_layer_idx:
        raise UnfitError("its layers divide scores by their number")
    return block_options(config, None) | {
        "num_layers": config.n_layer,
        "vocab_size": config.vocab_size,
        "num_positions": config.n_positions,
        "embedding_dropout_prob": config.embd_pdrop,
    }


def _model_inputs(call: Call) -> Any:
    words, mask, places, others, mask_of_others, labels = call.taken(
        "input_ids", "attention_mask", "position_ids", "encoder_hidden_states", "encoder_attention_mask", "labels"
    )
    if others is None:
        return words, hidden_of(mask), None, places, labels
    return words, hidden_of(mask), None, places, others, hidden_of(mask_of_others), labels


def _block_result(found: tuple[torch.Tensor | None, ...]) -> Any:
    import transformers

    return found[:1] if int(transformers.__version__.partition(".")[0]) < 5 else found[0]


KNOWN = {
    **known(("GPT2LMHeadModel", "GPT2Model"), MODEL, model_options, _DROPOUTS, _model_inputs),
    "GPT2Block": Known(
        DistributedTransformerLayer,
        BLOCK,
        lambda module: block_options(module.attn.config, module.attn.layer_idx),
        _DROPOUTS,
        inputs_of_layers,
        _block_result,
    ),
}


def get_hf_gpt2_transformer_layer_hooks() -> tuple[Hook, Hook, Hook]:
    """Hooks that register transformers' GPT2Block with DistributedTransformerLayer: of `__init__`, of `forward`, and of
    what it returns."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    def init_hook(config: Any, layer_idx: int | None = None) -> tuple[tuple, dict[str, Any]]:
        return (), block_options(config, layer_idx)

    def forward_hook(*args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        return (inputs_of_layers(Call(GPT2Block, args, kwargs)),), {}

    return like(init_hook, GPT2Block.__init__), like(forward_hook, GPT2Block.forward), _block_result


def translate_state_dict_to_hf_gpt2(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> Mapping[str, Any]:
    """A state of a model that has become DistributedTransformerLMHead, in the names that it had.

    Args:
        max_seq_len: no effect: causal masks are no part of states.
    """
    return to_theirs(MODEL, state_dict)


def translate_hf_state_dict_to_smdistributed_gpt2(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reverse of `translate_state_dict_to_hf_gpt2`."""
    return from_theirs(MODEL, state_dict)


def translate_hf_block_state_dict_to_smdistributed(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a GPT2Block, in the names of the DistributedTransformerLayer that it becomes."""
    return from_original(BLOCK, state_dict)


def translate_layer_state_dict_to_hf_gpt2_block(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reverse of `translate_hf_block_state_dict_to_smdistributed`."""
    return to_original(BLOCK, state_dict)
