# SPDX-License-Identifier: Apache-2.0
"""The user's content of checkpoints in the original's form: a pickle, the one thing in them that may make objects."""

import io
import os
import pickle
from typing import Any

import torch

from lamina.errors import FormatError, UsageError, refusal
from lamina.saved_state import archives

NAME = "user_content"


def beside(file: str) -> str:
    """The path of the file with the content of a whole model's."""
    folder, tag = os.path.split(file)
    return os.path.join(folder, f"{NAME}_{tag}")


def read(file: str, verify: bool, allow_pickle: bool) -> Any:
    """The content in a file; None of one that is empty or not there.

    Errors:
        FormatError: the file is damaged. UsageError: it has objects of classes, and these may not be made or cannot be.
    """
    if not os.path.isfile(file) or os.path.getsize(file) == 0:
        return None
    if verify:
        archives.check(file, None, whole=True)
    with open(file, "rb") as opened:
        return made(opened.read(), file, allow_pickle)


def made(content: bytes, file: str, allow_pickle: bool) -> Any:
    """The object of a pickle, which was in that file. Plain values, tensors among them, execute nothing."""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (EOFError, RuntimeError) as error:
        raise FormatError(f"{file} cannot be loaded: {error}", code="state-damaged") from error
    except pickle.UnpicklingError as error:
        if not allow_pickle:
            raise refusal("pickled", file) from error
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
    except Exception as error:
        raise UsageError(
            f"{file}: the user_content cannot be made here, {type(error).__name__}: {error}: it needs the modules and "
            "classes of the program that saved it",
            code="checkpoint-pickle",
        ) from error
