# SPDX-License-Identifier: Apache-2.0
"""Sliced layers that a step, or a method beside `forward`, calls by themselves. What is computed there of the parts
that they give and take is not proven, which is said once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lamina.tensor_parallel import layers
from lamina.util.told import tell


class ProvenRegions:
    """The regions of a model whose calls are proven, and those of them that this thread is in.

    Args:
        regions: by name.
        tells: whether this rank says what is not proven.
    """

    def __init__(self, regions: dict[str, nn.Module], tells: bool):
        self._open, self._tells = threading.local(), tells
        for name, region in regions.items():
            for path, layer in region.named_modules(prefix=name):
                if layer is not region and (layers.gives_parts(layer) or layers.takes_parts(layer)):
                    layer.__dict__.setdefault(layers.PROVEN_IN, (self, path, name))

    def __deepcopy__(self, memo: Any) -> "ProvenRegions":
        return self

    def __reduce__(self) -> Any:
        return _none, ()

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Around a call of the region of this name."""
        names = self._open.__dict__.setdefault("names", [])
        names.append(name)
        try:
            yield
        finally:
            names.pop()

    def note(self, path: str, region: str) -> None:
        """Says once that a layer is called outside of its region. A backward calls layers again that were in it."""
        is_inside = region in self._open.__dict__.get("names", ())
        if not self._tells or is_inside or torch._C._current_graph_task_id() >= 0:
            return
        self._tells = False
        tell(
            f"{path}, which is sliced, was called outside of the forward of {region or 'the model'}: what is computed "
            "there of this rank's part was not compared with whole layers, as calls of that module are. Let it call "
            'its layers in forward, or take "colwise_gather_output" and "rowwise_split_input" for what others call'
        )


def _none() -> None:
    return None
