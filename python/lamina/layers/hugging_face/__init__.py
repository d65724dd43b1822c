# SPDX-License-Identifier: Apache-2.0
"""Modules of transformers, and what they become: see [Note: slicing plan] for those that stay what they are."""

from torch import nn

from lamina.layers.hugging_face import bert, gpt2, gpt_neo, gptj
from lamina.tensor_parallel.registry import Registration

_FAMILIES = {
    "bert.modeling_bert": bert.KNOWN,
    "gpt2.modeling_gpt2": gpt2.KNOWN,
    "gpt_neo.modeling_gpt_neo": gpt_neo.KNOWN,
    "gptj.modeling_gptj": gptj.KNOWN,
    "roberta.modeling_roberta": bert.KNOWN,
}
_KNOWN = {
    f"transformers.models.{family}.{name}": known
    for family, kinds in _FAMILIES.items()
    for name, known in kinds.items()
}


def registration_of(module: nn.Module) -> Registration | None:
    """Returns what becomes of a module of transformers; None for all others."""
    kind = type(module)
    known = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if known is None else known.registration(kind)
