# SPDX-License-Identifier: Apache-2.0
"""Circles of names that use each other: C++ units in check_layers.py, Python modules in check_python_layers.py."""

from collections.abc import Mapping


def circles(uses: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """The members of each circle, sorted.

    Args:
        uses: by name, what it uses; what is used need not have an entry.
    """

    def reached(start: str) -> set[str]:
        found, todo = {start}, [start]
        while todo:
            new = uses.get(todo.pop(), set()) - found
            found |= new
            todo.extend(new)
        return found

    below = {name: reached(name) for name in uses}
    found = {tuple(sorted(other for other in below[name] if name in below.get(other, ()))) for name in uses}
    return {circle for circle in found if len(circle) > 1}
