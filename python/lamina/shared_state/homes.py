# SPDX-License-Identifier: Apache-2.0
"""The partitions on which attributes of modules are set.

[Note: homes of attributes] Every rank has all modules as objects, so what one rank sets the others do not see. The
partition on which an attribute of a module is set in a step is the attribute's home. On all others it is an error to
read or to set it in a step, and reading it afterwards warns. None of them is to go on with a value that is out of date.
They hear of homes with the calls between them: `news_for` goes with a request and with its answer, and what a rank has
heard it tells on. What an attribute holds counts as the attribute, under all names that it has in the model. A trace
ties modules that share attributes to one rank beforehand (tracing/state.py), and all ranks know then what it saw set.
"""

import warnings
from collections.abc import Callable, Iterable

from torch import nn

from lamina import _lamina
from lamina.errors import UsageError
from lamina.shared_state.modules import Key, Modules

News = tuple[int, str, int]  # a module by its place among the model's, an attribute, its home


class Homes:
    """The homes of attributes, as far as this rank has heard of them.

    Args:
        modules: the model's.
        here: this rank's partition.
        guard: has reads of attributes of that name be noticed in modules of that class.
    """

    def __init__(self, modules: Modules, here: int, guard: Callable[[type, str], None]):
        self._modules, self._here, self._guard = modules, here, guard
        self._homes: dict[Key, int] = {}
        self._foreign: dict[Key, int] = {}  # of those, what is, or is also, set on another partition
        self._news: list[News] = []
        self._told: dict[int, int] = {}  # how many of them each other partition was told
        self._warned: set[Key] = set()  # what was read after a step on a rank that is not its home

    def news_for(self, partition: int) -> list[News]:
        """Returns what that partition has not been told of homes; from now on it has."""
        told = self._told.get(partition, 0)
        if told == len(self._news):
            return []
        self._told[partition] = len(self._news)
        return [news for news in self._news[told:] if news[2] != partition]

    def hear(self, news: Iterable[News], by_all: bool = False) -> None:
        """Takes what another rank's `news_for` gave, or what all ranks hear at once."""
        for place, name, home in news:
            module = self._modules.all[place]
            key = id(module), name
            if home == self._here and by_all:
                self._homes[key] = home
            if home == self._here or self._foreign.get(key) == home:
                continue
            self._guard(type(module), name)
            self._foreign[key] = home
            self._homes.setdefault(key, home)
            if not by_all:
                self._news.append((place, name, home))

    def forget_told(self) -> None:
        """Tells everything again: after a step that has failed nobody knows what the others heard."""
        self._told.clear()

    def touch(self, module: nn.Module, name: str) -> None:
        """Notes that what `module` has in attribute `name` has changed here, in a step.

        Errors:
            UsageError: its home is another partition.
        """
        key = id(module), name
        if key in self._foreign:
            raise UsageError(self._message(module, name, "set"), code="step-attribute-shared")
        if key not in self._homes:
            self._homes[key] = self._here
            self._news.append((self._modules.places[id(module)], name, self._here))

    def is_elsewhere(self, module: nn.Module, name: str) -> bool:
        """True where it is set on another partition."""
        return bool(self._foreign) and (id(module), name) in self._foreign

    def refuse_to_read(self, module: nn.Module, name: str) -> None:
        """An error in a step; after it, where a script may look at what its rank did, a warning, once."""
        if _lamina.microbatch() >= 0:
            raise UsageError(self._message(module, name, "read"), code="step-attribute-shared")
        if (id(module), name) not in self._warned:
            self._warned.add((id(module), name))
            warnings.warn(self._message(module, name, "read"), stacklevel=4)

    def _message(self, module: nn.Module, name: str, done: str) -> str:
        home = self._foreign[id(module), name]
        return (
            f"{self._modules.path(module, name)} is set on partition {home} in a step, and {done} on partition "
            f"{self._here}: attributes stay on the rank that sets them. Hand the value on as an argument or a result, "
            f"or place the modules that set and read it on one partition: set_partition(module, {home})"
            + (", or 0 where a step's body does that" if home and not self._here else "")
        )
