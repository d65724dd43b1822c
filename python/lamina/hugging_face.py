# SPDX-License-Identifier: Apache-2.0
"""State dicts between Hugging Face's layers and their sliced counterparts.

`tensor_parallel_degree` is 1 and no layer is replaced by a sliced one, so the names are Hugging Face's on both sides.
"""

from collections.abc import Mapping
from typing import Any


def from_hugging_face(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict of a Hugging Face model, as the model takes it that lamina has distributed."""
    return state_dict


def to_hugging_face(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> Mapping[str, Any]:
    """The state dict of a model that lamina has distributed, as the plain Hugging Face model takes it.

    Args:
        state_dict: the whole model's.
        max_seq_len: for sliced layers, which may be built for longer sequences.
    """
    return state_dict
