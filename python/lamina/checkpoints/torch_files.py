# SPDX-License-Identifier: Apache-2.0
"""Files of torch.save with the tensors of a plain model, as Hugging Face's older folders have them."""

import json
import os
from collections.abc import Iterator

import torch

from lamina.errors import FormatError, said
from lamina.saved_state import archives

_FILE, _INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def torch_file(path: str) -> str | None:
    """The file that is to be read of a folder, or the path itself where it is such a file; None where there is none. A
    folder that has the tensors in a better form, too, has none."""
    if os.path.isfile(path):
        return path
    if any(os.path.exists(os.path.join(path, name)) for name in ("manifest.json", "model.safetensors")):
        return None
    return next((found for name in (_INDEX, _FILE) if os.path.isfile(found := os.path.join(path, name))), None)


def read_torch_file(path: str) -> dict[str, torch.Tensor]:
    """The tensors of such a file, or of all that an index names. Nothing is executed: torch reads tensors alone.

    Errors:
        FormatError: it is none, or has something else than tensors.
    """
    state: dict[str, torch.Tensor] = {}
    for file in _files(path):
        try:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=archives.is_zip(file))
        except Exception as error:
            raise FormatError(f"{file}: no file of tensors alone: {error}") from error
        if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise FormatError(f"{file}: not the state dict of a model")
        state |= found
    return state


def _files(path: str) -> Iterator[str]:
    if not path.endswith(".json"):
        yield path
        return
    folder = os.path.dirname(path)
    try:
        with open(path, encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise FormatError(f"{path}: no index of a model's files: {error!r}") from error
    for name in names:
        if os.path.basename(name) != name:
            raise FormatError(f"{path}: " + said("no-file-beside", repr(name)))
        yield os.path.join(folder, name)
