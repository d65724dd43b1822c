# SPDX-License-Identifier: Apache-2.0
"""Names of weights in the models of Hugging Face."""

from collections.abc import Mapping
from typing import Any

from lamina.libraries.replacements import module_manager

__all__ = ["from_hugging_face", "to_hugging_face"]


def from_hugging_face(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict of a plain model, in the names of the current job's model, in which modules may have become
    others."""
    for _, from_original in module_manager.translate_functions:
        state_dict = from_original(state_dict)
    return state_dict


def to_hugging_face(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> Mapping[str, Any]:
    """The reverse of `from_hugging_face`.

    Args:
        state_dict: the whole model's.
        max_seq_len: no effect.
    """
    for to_original, _ in module_manager.translate_functions:
        state_dict = to_original(state_dict)
    return state_dict
