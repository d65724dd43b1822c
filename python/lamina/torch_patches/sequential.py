# SPDX-License-Identifier: Apache-2.0
"""The forward of nn.Sequential, where several of its modules are called at once."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from lamina.util.settings import replace

Calls = tuple[list[nn.Module], list[Callable[[Any], Any]]]  # a Sequential's modules, and what it calls in their place

_TORCHS = nn.Sequential.forward


def install(calls: Mapping[int, Calls], undo: ExitStack) -> None:
    """Until `undo` is closed, Sequentials make these calls, by their ids. Their owner keeps them alive until then."""
    if not calls:
        return
    calls, original = dict(calls), nn.Sequential.forward
    undo.callback(calls.clear)

    def forward(self: nn.Sequential, input: Any) -> Any:
        children, own = calls.get(id(self), (None, None))
        if children is None or children != list(self._modules.values()):  # else somebody has changed it since
            return original(self, input)
        for call in own:
            input = call(input)
        return input

    replace(undo, nn.Sequential, "forward", forward, stays=True)


@contextmanager
def plainly() -> Iterator[None]:
    """Meanwhile Sequentials call their modules themselves."""
    with ExitStack() as undo:
        replace(undo, nn.Sequential, "forward", _TORCHS)
        yield


def is_plain(kind: type[nn.Sequential]) -> bool:
    """True where objects of that class have torch's forward of nn.Sequential."""
    return kind.forward is _TORCHS
