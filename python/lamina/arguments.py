# SPDX-License-Identifier: Apache-2.0
"""Arguments of a module that runs for another rank. They are copies, so a change of one is lost on the caller.

Tensors are not looked into: what a module writes into them is not this file's.
"""

import functools
import inspect
import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lamina.errors import UsageError

_UNCHANGING = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, slice, range)


class ArgumentCheck:
    """Knows what the arguments were before a call, and says after it when one has changed.

    Args:
        module: the module that is called. In training, what becomes of the caches of Hugging Face's models in the
            arguments does not matter: by default each block is handed one and fills it.
        name: its name in the model.
    """

    def __init__(self, module: nn.Module, name: str, args: tuple, kwargs: dict[str, Any]):
        self._module = module
        self._name = name
        self._training = module.training
        self._before = [
            (position, value, _Snapshot(value, self._training))
            for position, value in _arguments(args, kwargs)
            if not _is_unchanging(value)
        ]

    def after(self) -> None:
        """Raises UsageError, with the name of the module and of the argument, when one has changed."""
        for position, value, before in self._before:
            if before.data is not None and _Snapshot(value, self._training).data != before.data:
                raise UsageError(self._message(position, before.caches))

    def _message(self, position: int | str, caches: bool) -> str:
        argument = _argument_name(self._module, position)
        remedy = (
            "pass use_cache=False to the model" if caches else "return what changes, or place both on one partition"
        )
        return (
            f"{self._name} changed {argument}, which the calling rank does not see: arguments of a module on another "
            f"rank are copies; {remedy}"
        )


class _Snapshot(pickle.Pickler):
    """What an object says of itself when it is pickled, its tensors and modules by identity.

    Attributes:
        data: equal for equal content; None when the object cannot be pickled.
        caches: whether Hugging Face caches were met.
    """

    def __init__(self, value: Any, training: bool):
        file = io.BytesIO()
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.caches = False
        self._training = training
        self._held: list[Any] = []  # lest another object gets its id
        try:
            self.dump(value)
            self.data = file.getvalue()
        except Exception:
            self.data = None
        self.clear_memo()

    def persistent_id(self, value: Any) -> int | str | None:
        if is_cache(type(value)):
            self.caches = True
            return "cache" if self._training else None
        if isinstance(value, (torch.Tensor, nn.Module)):
            self._held.append(value)
            return id(value)
        return None


def _is_unchanging(value: Any) -> bool:
    if isinstance(value, tuple) and not hasattr(value, "__dict__"):
        return all(_is_unchanging(part) for part in value)
    return isinstance(value, _UNCHANGING) or (isinstance(value, nn.Module) and not is_cache(type(value)))


@functools.lru_cache
def is_cache(kind: type) -> bool:
    """Whether a class is a key-value cache of Hugging Face's transformers, which need not be installed."""
    return any(base.__name__ == "Cache" and base.__module__ == "transformers.cache_utils" for base in kind.__mro__)


def _arguments(args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()


def _argument_name(module: nn.Module, position: int | str) -> str:
    """As the signature of the module's forward has it, else its position."""
    if isinstance(position, str):
        return f"its argument {position!r}"
    parameters = list(inspect.signature(module.forward).parameters.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (
        f"its argument {positional[position]!r}"
        if position < len(positional)
        else f"its positional argument {position}"
    )
