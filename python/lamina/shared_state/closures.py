# SPDX-License-Identifier: Apache-2.0
"""Objects that functions of a script share outside of modules: names of a closure, global names, attributes of a bound
object.

A dictionary that a hook fills and a step body reads, say. Each rank has its own, filled by what runs there. Which
functions use which names can be read in their code; that one of these has changed is seen in a step. It is an error
where functions that run on different ranks use it, or, with several microbatches under way, several functions of one
rank. The others would go on with a value that is out of date, or another microbatch's. Hooks that a step body hangs on
modules are an error, too, where they are not called, or for other microbatches. What the trace sees modules share is on
one rank beforehand (`SharedNames`).
"""

import threading
import warnings
from collections.abc import Callable, Iterable

from torch import nn
from torch.utils.hooks import RemovableHandle

from lamina import _lamina
from lamina.errors import UsageError
from lamina.libraries import hugging_face
from lamina.script_state.content import Content, changed_by_more_than_counting, is_generator
from lamina.script_state.names import HOOKS
from lamina.script_state.places import Change, Place, Places
from lamina.shared_state.variables import ContextVariables, travels

_BODY = "the step function"


class _Watched:
    """A place, and what was seen of it."""

    def __init__(self, place: Place):
        self.place = place
        self._is_of_thread = isinstance(place.read(), threading.local)
        self._of_threads: dict[int, Content] = {}
        self.microbatch = -1  # that changed it last
        self.before: Content = {} if self._is_of_thread else place.look()

    def look(self) -> tuple[Content, Content]:
        """Returns what it was when last looked at, and what it is."""
        after = self.place.look()
        if self._is_of_thread:
            thread = threading.get_ident()
            before = self._of_threads.get(thread, {})
            self._of_threads[thread] = after
        else:
            before, self.before = self.before, after
        return before, after


class WatchedNames:
    """The names that functions of the script share, watched in steps.

    Args:
        modules: the model's with their names, and the partition of each.
        here: this rank's.
        in_turns: tells whether several microbatches may be under way.

    Attributes:
        variables: the context variables among them.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module, int]], here: int, in_turns: Callable[[], bool]):
        self.variables = ContextVariables()
        self._modules, self._here, self._in_turns = list(modules), here, in_turns
        self._places = Places(module for _, module, _ in self._modules)
        self._watched: list[_Watched] = []
        self._told: set[int] = set()  # places, by id
        self._late: UsageError | None = None  # of the step before
        self._handles = 0  # as many hooks of whatever kind there were when those of the modules were looked at
        self._looked = 0  # the same for the last look within a step
        self._hung: dict[int, set[int]] = {}  # their ids, by id(module)
        for name, module, partition in self._modules:
            self._places.add_module(module, partition, name or "the model")
        self._add_hooks()

    def add_body(self, body: Callable) -> None:
        """Notes what the body of a step function uses, as it is called. The caller keeps it."""
        self._places.add(body, 0, _BODY)

    def begin_step(self) -> None:
        """A step begins, in this thread."""
        if self._handles != RemovableHandle.next_id:
            self._add_hooks()
        self.watch()

    def watch(self) -> None:
        """From now on changes are noticed."""
        found = list(self._places.by_key.values())
        self.variables.begin_step(found)
        self._watched = [
            _Watched(place)
            for place in found
            if place.is_used(self._here) and not travels(place) and self._may_differ(place)
        ]

    def _may_differ(self, place: Place) -> bool:
        """True where other ranks, or other microbatches, may have to see a change of it here."""
        return bool(place.elsewhere(self._here)) or (self._in_turns() and place.keeps(self._here))

    def look_back(self) -> None:
        """Looks once more on a rank that follows: hooks of a backward may have run since. It tells in the next step of
        what they changed. What the body of the rank that leads changes comes to the others."""
        if self._here != 0:
            try:
                self.look()
            except UsageError as error:
                self._late = error

    def look(self) -> None:
        """Called where other ranks, or another microbatch, may go on with what is here.

        Errors:
            UsageError: what functions share has changed, and not all of them see that.
        """
        if self._late is not None:
            late, self._late = self._late, None
            raise late
        if RemovableHandle.next_id not in (self._handles, self._looked):
            self._look_at_hooks()
        for watched in self._watched:
            before, after = watched.look()
            if before != after:
                self._require_seen(watched, watched.place.change(before, after))

    def _require_seen(self, watched: _Watched, change: Change) -> None:
        place, here = watched.place, self._here
        if not change.parts:
            return
        microbatch, watched.microbatch = watched.microbatch, _lamina.microbatch()
        if not place.tells_nothing(change, here):
            other = next(iter(place.elsewhere(here, change).values()))
            if not place.is_read(change):
                self._tell(place, other)
            else:
                raise UsageError(
                    f"{place.name}, which {place.here(here)} changes on partition {here}, is used by {other} as "
                    "well, which does not see that: they run on different ranks. Hand the value on as an argument or a "
                    "result, or place both on one partition with set_partition",
                    code="step-name-shared",
                )
        turns = self._in_turns() and place.keeps(here, change) and microbatch not in (-1, _lamina.microbatch())
        turns = turns and not is_generator(place.read())  # whose numbers are anybody's
        if turns and changed_by_more_than_counting(change.before, change.after, place.counts):
            raise UsageError(
                f"{place.name} is changed by several microbatches, which run in turns, and read by another function "
                "than the one that changes it, or later: set active_microbatches to 1, or return the value",
                code="step-object-shared",
            )

    def _tell(self, place: Place, other: str) -> None:
        """Warns, once, of what a function changes that runs on other ranks as well: a log, mostly, or a counter."""
        if id(place) not in self._told:
            self._told.add(id(place))
            warnings.warn(
                f"{place.name} is changed by {place.here(self._here)} on partition {self._here}, and by {other}, which "
                "runs on another rank: each rank has its own",
                stacklevel=2,
            )

    def _add_hooks(self) -> None:
        self._handles = RemovableHandle.next_id
        for name, module, partition in self._modules:
            hooks = _hooks_of(module)
            self._hung[id(module)] = set(hooks)
            for hook in hooks.values():
                self._places.add(hook, partition, f"a hook of {name or 'the model'}")

    def _look_at_hooks(self) -> None:
        self._looked = RemovableHandle.next_id
        for name, module, partition in self._modules:
            hung = _hooks_of(module).keys() - self._hung[id(module)]
            if hung and self._in_turns() and partition == self._here:  # elsewhere `foreign` refuses it
                raise UsageError(
                    f"a hook was hung in a step on {name or 'the model'}, where it is called for other microbatches, "
                    "too: hang it before the step, or set active_microbatches to 1",
                    code="step-hook",
                )


class SharedNames:
    """Notes in a trace which modules share names.

    Args:
        modules: the model's with their names, and the node of each.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module, int]]):
        modules = list(modules)
        places = Places(module for _, module, _ in modules)
        for name, module, node in modules:
            places.add_module(module, node, name or "the model")
        shared = [place for place in places.by_key.values() if len(place.nodes()) > 1]
        self._seen = [(place, place.look()) for place in shared if not travels(place)]
        self._used: dict[int, list[int]] = {}  # of those, which the code of each node names
        for number, (place, _) in enumerate(self._seen):
            for node in place.nodes():
                self._used.setdefault(node, []).append(number)
        self._variables = [place for place in shared if travels(place)]
        self._frames: list[list[Content]] = []  # of the variables, when each call began that has not ended
        self._written: dict[str, set[int]] = {}  # by name: the nodes that meet what was written
        self._called: set[int] = set()

    def enter(self, node: int) -> None:
        """A call begins, by a node: what has changed is its doing."""
        self._look(node)
        self._frames.append([place.look() for place in self._variables])

    def leave(self, node: int) -> None:
        """The innermost call ends, of a node: what has changed is its doing."""
        self._look(node)
        for place, before in zip(self._variables, self._frames.pop(), strict=True):
            if place.look() != before:  # its caller sees that
                self._written.setdefault(place.name, set()).update(place.nodes())

    def ties(self) -> list[tuple[set[int], str]]:
        """Nodes that share a name, and the name; once the model has been called."""
        for number in range(len(self._seen)):  # whoever has changed what it was handed
            self._compare(number, 0)
        drawn = [(place.nodes(), place.name) for place, _ in self._seen if is_generator(place.read())]
        found = [(nodes & self._called, name) for nodes, name in [*drawn, *((v, k) for k, v in self._written.items())]]
        return [tie for tie in found if len(tie[0]) > 1]

    def _look(self, node: int) -> None:
        self._called.add(node)
        for number in self._used.get(node, ()):
            self._compare(number, node)

    def _compare(self, number: int, node: int) -> None:
        place, before = self._seen[number]
        after = place.look()
        if before != after:
            self._seen[number], change = (place, after), place.change(before, after)
            if change.parts and not place.tells_nothing(change, node) and place.is_read(change):
                self._written.setdefault(place.name, set()).update(place.nodes(change))


def _hooks_of(module: nn.Module) -> dict[int, Callable]:
    """By number. Hugging Face's own collect what a model returns, and are no hooks of the script's."""
    found = {number: hook for kind in HOOKS for number, hook in vars(module).get(kind, {}).items()}
    theirs = hugging_face.collectors(module) if found else []
    return {number: hook for number, hook in found.items() if hook not in theirs}
