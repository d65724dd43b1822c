# SPDX-License-Identifier: Apache-2.0
"""The models of equivalence.real_models and one with experts, with dropout as they come, and their batches."""

import torch
import transformers
from equivalence import real_models
from equivalence.real_models import RealModel


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=real_models.VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    )


MODELS = {model.name: model for model in real_models.MODELS} | {"mixtral": RealModel("mixtral", mixtral)}
# Experts are picked by numbers that rounding changes.
NOT_HALF = {"mixtral"}


def batch_of(name: str, seed: int) -> dict[str, torch.Tensor]:
    model = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    if model.images:
        pixels = torch.randn(4, 3, 32, 32, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(2, (4,), generator=generator)}
    tokens = torch.randint(3, real_models.VOCABULARY, (2, 4, real_models.LENGTH), generator=generator)
    return {"input_ids": tokens[0], "labels": tokens[1]}
