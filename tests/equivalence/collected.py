# SPDX-License-Identifier: Apache-2.0
"""Outputs that Hugging Face's models collect of their layers, where layers live on other ranks: refused by an error
that names them, and never a list that lacks them."""

import os
import re
from collections.abc import Callable

import torch
import transformers
from torch import nn

import lamina

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def attentions() -> list[str]:
    config = transformers.LlamaConfig(**SIZES, attn_implementation="eager")
    text = "attentions of a LlamaAttention inside a LlamaDecoderLayer that another rank owns cannot be collected"
    return refused(transformers.LlamaForCausalLM(config), text, output_attentions=True)


def router_logits() -> list[str]:
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))
    text = (
        "router_logits of a MixtralTopKRouter inside a MixtralDecoderLayer that another rank owns cannot be collected"
    )
    return refused(model, text, output_router_logits=True)


def refused(module: nn.Module, text: str, **asked: bool) -> list[str]:
    """Lists what is wrong: the model is traced, asking is an error, and not asking is none."""
    lamina.init(partitions=int(os.environ["WORLD_SIZE"]), microbatches=2, timeout_s=60)
    try:
        model = lamina.distribute(module)

        @lamina.step
        def train(tokens, asked):
            loss = model(input_ids=tokens, labels=tokens, **asked).loss
            model.backward(loss)
            return loss

        tokens = torch.arange(24).reshape(4, 6)
        wrong = []
        try:
            train(tokens, asked)
            wrong.append("it was not refused")
        except lamina.UsageError as error:
            if not re.search(text, str(error)):
                wrong.append(f"it says {error}")
        if notes := model.partition_report()["notes"]:
            wrong.append(f"it was not traced: {notes}")
        if not train(tokens, {}).reduce_mean() > 0:
            wrong.append("it does not train afterwards")
        return wrong
    finally:
        lamina.shutdown()


COLLECTED: dict[str, Callable[[], list[str]]] = {
    "the attentions of remote layers are refused": attentions,
    "the router logits of remote layers are refused": router_logits,
}
