# SPDX-License-Identifier: Apache-2.0
"""The parts that transformers' causal language models have in common, with a head and without."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lamina.layers.hugging_face.known import Call, Known, hidden_of, rows_of
from lamina.layers.transformer import DistributedTransformerLMHead
from lamina.tensor_parallel.correspondence import Correspondence, Row, from_original, to_original, with_names

Options = Callable[[Any], dict[str, Any]]


def rows_of_model(block: Correspondence) -> Correspondence:
    """The rows of a model, of those of its blocks."""
    return (
        Row("wte.weight", "word_embedding.weight"),
        Row("wpe.weight", "position_embedding.weight"),
        *with_names(block, "h.*.", "transformer.seq_layers.*."),
        *rows_of("ln_f", "layernorm"),
    )


def with_head(model: Correspondence) -> Correspondence:
    """The rows of a model inside of one with a head."""
    return (*with_names(model, "transformer.", ""), *rows_of("lm_head", "lm_head"))


def known(
    names: tuple[str, str],
    rows: Correspondence,
    options: Options,
    dropouts: Mapping[str, tuple[str, ...]],
    inputs: Callable[[Call], Any],
) -> dict[str, Known]:
    """The classes of a family: with a head, and without.

    Args:
        rows: of the one without.
        options: the arguments of the class that they become, of a configuration, but for the head.
        dropouts: the names of Dropouts in a block, for arguments.
        inputs: the argument of its `forward`.
    """
    inside = {option: tuple(f"h.*.{name}" for name in places) for option, places in dropouts.items()}
    inside |= {"embedding_dropout_prob": ("drop",)}
    below = {option: tuple(f"transformer.{name}" for name in places) for option, places in inside.items()}
    kind, (language_model, model) = DistributedTransformerLMHead, names

    def without_head(module: nn.Module) -> dict[str, Any]:
        return options(module.config) | {"add_lm_head": False}

    def with_one(module: nn.Module) -> dict[str, Any]:
        return _with_head(module, options)

    return {
        language_model: Known(kind, with_head(rows), with_one, below, inputs, _with_loss),
        model: Known(kind, rows, without_head, inside, inputs, _states_of_model),
    }


def inputs(call: Call) -> Any:
    """The argument of DistributedTransformerLMHead, of the usual ones."""
    words, mask, places, labels = call.taken("input_ids", "attention_mask", "position_ids", "labels")
    return words, hidden_of(mask), None, places, labels


def to_theirs(model: Correspondence, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state of a model, with or without a head, that has become DistributedTransformerLMHead, in the names that it
    had; other names stay as they are.

    Args:
        model: the rows of one without a head.
    """
    return to_original(with_head(model) if "lm_head.weight" in state else model, state)


def from_theirs(model: Correspondence, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reverse of `to_theirs`."""
    return from_original(with_head(model) + model, state)


def _with_head(module: nn.Module, options: Options) -> dict[str, Any]:
    head, embedding = module.lm_head, module.transformer.wte
    return options(module.config) | {
        "tie_lm_head": head.weight is embedding.weight,
        "lm_head_bias": head.bias is not None,
        "loss_in_fp32": True,
    }


def _with_loss(found: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

    loss, scores = found if isinstance(found, tuple) else (None, found)
    return CausalLMOutputWithCrossAttentions(loss=loss, logits=scores)


def _states_of_model(states: torch.Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states)
