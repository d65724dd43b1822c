# SPDX-License-Identifier: Apache-2.0
"""Everything that is watched of a script's state while its model is cut. Without the Watch all of it is forgotten."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from lamina import _lamina
from lamina.script_state.names import methods_of
from lamina.shared_state import swapping
from lamina.shared_state.attributes import Attributes
from lamina.shared_state.closures import WatchedNames
from lamina.shared_state.homes import News
from lamina.shared_state.modules import Modules
from lamina.shared_state.swapping import Swapping
from lamina.shared_state.training_modes import TrainingModes
from lamina.torch_patches import module_attributes
from lamina.torch_patches import swapping as swaps


class Watch:
    """Watches the state of a script that ranks, or microbatches that take turns, would each see in another way.

    Steps may begin before its model is known; then there is nothing to watch but what their bodies are, and the modes
    that they leave.

    Attributes:
        modes: those of modules, training or evaluation.
    """

    def __init__(self) -> None:
        self.modes = TrainingModes()
        self._modules = Modules()
        self._bodies: dict[tuple, Callable] = {}  # of step functions, as they are called; kept, so that ids stay theirs
        self._attributes: Attributes | None = None
        self._names: WatchedNames | None = None
        self._swapping: Swapping | None = None
        self._undo = ExitStack()

    def install(
        self,
        model: nn.Module,
        wrapper: nn.Module,
        owned: Sequence[tuple[str, nn.Module, int]],
        here: int,
        elsewhere: Callable[[nn.Module], int | None],
        waited: Sequence[str],
        homes: Sequence[News],
        in_turns: Callable[[], bool],
    ) -> None:
        """From now on the state around a model is watched, in a step that may be under way; once.

        Args:
            model: as on every rank. The caller keeps it alive until `remove`.
            wrapper: the DistributedModel around it.
            owned: its modules with their names, and the partition of each.
            here: this rank's partition.
            elsewhere: the partition of a module that another rank owns, None for any other.
            waited: names of modules whose callers wait for them, so that what is called next finds what they set.
            homes: where a trace saw attributes set, alike on all ranks.
            in_turns: tells whether several microbatches may be under way.
        """
        named = list(model.named_modules())
        self._modules = Modules(named)
        self._attributes = Attributes(self._modules, here, elsewhere, waited, self._codes)
        self._undo.callback(self._attributes.remove)
        self._attributes.homes.hear(homes, by_all=True)
        self.modes.modules = Modules([*named, ("", wrapper)])
        self._undo.callback(self.modes.remove)
        module_attributes.install(self._before_set, self._undo)
        self._swapping = Swapping(self._modules, in_turns)
        swaps.install(self._before_swap, self._undo)
        self._names = WatchedNames(owned, here, in_turns)
        for body in self._bodies.values():
            self._names.add_body(body)
        self._names.watch()

    def remove(self) -> None:
        """Attributes and names are the plain model's again. Nothing else may be asked afterwards."""
        self._undo.close()
        self._modules = self.modes.modules = Modules()
        self._attributes = self._names = self._swapping = None

    def begin_step(self, body: Callable, owner: tuple) -> None:
        """A step begins, with a body that the rank of partition 0 runs; `owner`: the object of a body that is a
        method."""
        key = *_identity(body), id(owner[0]) if owner else None
        if key not in self._bodies:
            self._bodies[key] = MethodType(body, owner[0]) if owner else body
            if self._names is not None:
                self._names.add_body(self._bodies[key])
        if self._names is not None:
            self._names.begin_step()
            self._attributes.begin_step()

    def end_microbatch(self, microbatch: int) -> None:
        """A step body is over, or has failed."""
        if self._attributes is not None:
            self._attributes.end_microbatch(microbatch)

    def look_back(self) -> None:
        """All bodies are over, and nothing of what they changed has been brought here: see `WatchedNames.look_back`."""
        if self._names is not None:
            self._names.look_back()

    def end_step(self, failed: bool = False) -> None:
        """All bodies are over."""
        self.modes.end_step()
        if self._attributes is not None:
            self._attributes.end_step(failed)

    def look(self) -> None:
        """Called where other ranks, or another microbatch, may go on with what is here: see `WatchedNames.look`."""
        self._names.look()

    def before_call(self, name: str, modules: list[nn.Module]) -> None:
        """Before module `name`, with all under it `modules`, is called on its rank.

        Errors:
            UsageError: it would not see there what is here.
        """
        self._names.look()
        if swapping.caches():
            self._swapping.refuse_cached(name, modules)

    def serve(self, name: str, variables: bytes, run: Callable[..., Any], *args: Any) -> Any:
        """Returns `run(*args)`: it runs the module of that name for another rank, of which `variables` gave those."""
        served = self._attributes.setters.served
        outer, served.name = served.name, name
        try:
            if not variables and not self._names.variables.are_used:
                return run(*args)
            with self._names.variables.set_here(variables, name):
                return run(*args)
        finally:
            served.name = outer

    def variables(self) -> bytes:
        """See `ContextVariables.captured`."""
        return self._names.variables.captured() if self._names.variables.are_used else b""

    def news_for(self, partition: int) -> list[News]:
        """See `Homes.news_for`.

        Errors:
            UsageError: see `Homes.touch`.
        """
        self._attributes.look()
        return self._attributes.homes.news_for(partition)

    def hear(self, news: list[News]) -> None:
        """See `Homes.hear`."""
        self._attributes.homes.hear(news)

    def _before_set(self, module: nn.Module, name: str, value: Any) -> None:
        if name == "training":
            self.modes.before_set(module, value)
        elif module in self._modules and _lamina.microbatch() >= 0:
            self._attributes.before_set(module, name, value)

    def _before_swap(self, module: nn.Module) -> None:
        if self._swapping is not None:
            self._swapping.refuse_swap(module)

    def _codes(self) -> Iterator[CodeType]:
        """Gives the code of functions that run in a step."""
        yield from (method.__code__ for method in methods_of(*map(type, self._modules.all)))
        held = (each for module in self._modules.all for each in vars(module).values())
        yield from (each.__code__ for each in held if isinstance(each, FunctionType))
        bodies = (inspect.unwrap(getattr(body, "__func__", body)) for body in self._bodies.values())
        yield from (body.__code__ for body in bodies if isinstance(body, FunctionType))


def _identity(body: Callable) -> tuple:
    """Tells a function from one that would use other names: a script may make the same one in each step."""
    if not isinstance(body, FunctionType):
        return (id(body),)
    held = (*(body.__closure__ or ()), *(body.__defaults__ or ()), *(body.__kwdefaults__ or {}).values())
    return (body.__code__, *map(id, held))
