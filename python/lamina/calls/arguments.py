# SPDX-License-Identifier: Apache-2.0
"""Arguments of a module that runs for another rank. They are copies, so a change of one has to go back to the caller:
see [Note: changes].

Tensors are not looked into: what a module writes into them is not this file's.
"""

import functools
import inspect
import io
import pickle
from typing import Any

import torch
from torch import nn

from lamina.calls.changes import Position
from lamina.errors import UsageError
from lamina.script_state.kinds import PLAIN

_UNCHANGING = (*PLAIN, torch.Tensor)
# Types of what is unchanging, without a look at the value: a class derived from one may have more.
UNCHANGING_TYPES = frozenset((*_UNCHANGING, nn.Parameter))


class ArgumentCheck:
    """Knows what the arguments were before a call, and says after it which have changed.

    Args:
        module: the module that is called. In training, what becomes of the caches of Hugging Face's models in the
            arguments does not matter: by default each block is handed one and fills it, and nobody reads it.
        name: its name in the model.
    """

    def __init__(self, module: nn.Module, name: str, args: tuple, kwargs: dict[str, Any]):
        self._module = module
        self._name = name
        self._training = module.training
        self._before = [
            (position, value, _Snapshot(value, self._training))
            for position, value in (*enumerate(args), *kwargs.items())
            if not is_unchanging(value)
        ]

    def changed(self) -> dict[Position, Any]:
        """The arguments that are not what they were, by position or keyword.

        Errors:
            UsageError: one holds something now that cannot be sent back; it names module and argument.
        """
        found = {}
        for position, value, before in self._before:
            if before.data is None:
                continue
            after = _Snapshot(value, self._training).data
            if after is None:
                raise UsageError(
                    f"{self._name} changed {_argument_name(self._module, position)} to what cannot be sent back to the "
                    "calling rank: arguments of a module on another rank are copies; place both on one partition",
                    code="step-argument-changed",
                )
            if after != before.data:
                found[position] = value
        return found


class _Snapshot(pickle.Pickler):
    """Content that an object tells of itself when it is pickled, its tensors and modules by identity.

    Attributes:
        data: equal for equal content; None when the object cannot be pickled.
    """

    def __init__(self, value: Any, training: bool):
        file = io.BytesIO()
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
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
            return "cache" if self._training else None
        if isinstance(value, (torch.Tensor, nn.Module)):
            self._held.append(value)
            return id(value)
        return None


def is_unchanging(value: Any) -> bool:
    """True for an argument that no module can change, but by writing to tensors."""
    if isinstance(value, tuple) and not hasattr(value, "__dict__"):
        return all(is_unchanging(part) for part in value)
    return isinstance(value, _UNCHANGING) or (isinstance(value, nn.Module) and not is_cache(type(value)))


@functools.lru_cache
def is_cache(kind: type) -> bool:
    """True for a class that is a key-value cache of Hugging Face's transformers, which need not be installed."""
    return any(base.__name__ == "Cache" and base.__module__ == "transformers.cache_utils" for base in kind.__mro__)


def _argument_name(module: nn.Module, position: Position) -> str:
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
