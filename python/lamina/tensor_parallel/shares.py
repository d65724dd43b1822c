# SPDX-License-Identifier: Apache-2.0
"""Parts of positions that ranks have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """A rank's part of positions: so many, from the first of them on, of all."""

    own: int
    first: int
    all: int


def share(count: int, degree: int, index: int) -> Share:
    """Shares positions out as [Note: layout] of lamina/layout/ does: the last ranks get fewer. Compiled forwards cannot
    ask the engine."""
    most = -(-count // degree)
    first = min(index * most, count)
    return Share(min(most, count - first), first, count)
