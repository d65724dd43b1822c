# SPDX-License-Identifier: Apache-2.0
"""Values that modules keep in their attributes while a step runs, such as a mask or a residual.

Microbatches take turns within one module: while one waits for another rank, the next may set what the first has yet to
read. So each microbatch sees what it set itself, and what was set last where it set nothing. What is in an object (a
dictionary that a hook fills) is everybody's: there it is an error when one microbatch changes it between two uses by
another. Ranks hear of what others set: see [Note: homes of attributes].

[Note: updates] A statement may make an attribute's new value of its old one (`self.count += 1`). It goes on from the
value that was set last, by whichever microbatch, unless its own microbatch has set the attribute anew before. So
counters count, and state that begins with each microbatch is its own. Nobody else comes between the two halves of an
update: before it reads, this thread waits for all that it may wait for.
"""

import numbers
import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType, MemberDescriptorType
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError
from lamina.script_state.content import same
from lamina.script_state.kinds import InPlaceOfValue
from lamina.script_state.uses import updates_here
from lamina.shared_state.attribute_contents import AttributeContents
from lamina.shared_state.homes import Homes
from lamina.shared_state.modules import Key, Modules
from lamina.shared_state.setters import Setters
from lamina.torch_patches import compiled, module_attributes

_MISSING = object()
# Files of those who read and set for a script.
_BETWEEN = {__file__, compiled.__file__, module_attributes.__file__, nn.modules.module.__file__}


class Attributes:
    """The attributes that a model's modules set in a step: each microbatch's own, and of one partition.

    Args:
        modules: the model's.
        here: this rank's partition.
        elsewhere: the partition of a module that another rank owns, None for any other.
        waited: see `Setters`.
        codes: gives the code of functions that run in a step.

    Attributes:
        homes: the partitions that set them.
        look: looks at what is in them, before others hear of it; UsageError as `Homes.touch`.
        setters: the calls that set them.
    """

    def __init__(
        self,
        modules: Modules,
        here: int,
        elsewhere: Callable[[nn.Module], int | None],
        waited: Sequence[str],
        codes: Callable[[], Iterable[CodeType]],
    ):
        self._modules, self._here, self._elsewhere = modules, here, elsewhere
        self._replaced: dict[tuple[type, str], Any] = {}  # what classes had themselves where they have an _Attribute
        self._own: dict[int, dict[Key, Any]] = {}  # what each microbatch set in this step
        self._anew: dict[int, set[Key]] = {}  # of those, what it has set by more than updates
        self._updated: dict[int, dict[Key, Any]] = {}  # what updates of each microbatch have read and not set yet
        self.homes = Homes(modules, here, self._guard)
        self.setters = Setters(modules, waited)
        self._contents = AttributeContents(modules, codes, self.homes.touch)
        self._contents.hold_all(self._guard)
        self.look = self._contents.look

    def begin_step(self) -> None:
        """A step begins."""
        self._contents.begin_step()

    def before_set(self, module: nn.Module, name: str, value: Any) -> None:
        """Before `module.name = value` in a step: it may be the first of that name.

        Errors:
            UsageError: a parameter or buffer of another rank.
        """
        if name == "__class__":
            where = self._modules.names[self._modules.places[id(module)]] or "the model"
            raise UsageError(
                f"the class of {where} is set in a step, which neither other ranks nor other microbatches see: have "
                "its forward choose what it does",
                code="step-attribute-shared",
            )
        if _is_plain(module, name, value):
            self._guard(type(module), name)
        elif not isinstance(value, nn.Module) and (owner := self._elsewhere(module)) is not None:
            raise UsageError(
                f"{self._modules.path(module, name)}, a parameter or buffer of partition {owner}, is set on partition "
                f"{self._here}: its owner does not see that; set it in the module's own forward, or place what sets it "
                "there, too",
                code="step-buffer-set",
            )

    def end_microbatch(self, microbatch: int) -> None:
        """Its step body is over. What it set on ranks that follow is kept until the step ends."""
        for kept in (self._own, self._anew, self._updated):
            kept.pop(microbatch, None)
        self._contents.end_microbatch(microbatch)

    def end_step(self, failed: bool) -> None:
        """The value that was set last stays."""
        self.setters.end_step()
        self._contents.end_step()
        for kept in (self._own, self._anew, self._updated):
            kept.clear()
        if failed:
            self.homes.forget_told()

    def remove(self) -> None:
        """Attributes are those of the classes again."""
        while self._replaced:
            (kind, name), had = self._replaced.popitem()
            if isinstance(vars(kind).get(name), _Attribute):
                delattr(kind, name) if had is _MISSING else setattr(kind, name, had)

    def read(self, module: nn.Module, attribute: "_Attribute") -> Any:
        """The value of an attribute for the microbatch of this thread; `_MISSING` for none but the class's."""
        name, microbatch = attribute.name, _lamina.microbatch()
        key = id(module), name
        updates = microbatch >= 0 and module in self._modules and updates_here(_user(), name)
        own = self._mine(microbatch).get(key, _MISSING)
        if own is not _MISSING and not (updates and key not in self._anew.get(microbatch, ())):
            self.setters.require_order(module, name, microbatch)
            return own
        if updates:
            _lamina.settle()
            self._updated.setdefault(microbatch, {})[key] = attribute.last(module)
        last = attribute.stored(module)
        if last is not _MISSING and microbatch >= 0:
            self._contents.use(module, name, last, microbatch)
        return last

    def write(self, module: nn.Module, attribute: "_Attribute", value: Any) -> None:
        """Sets an attribute, in a step for the microbatch of this thread."""
        name, microbatch = attribute.name, _lamina.microbatch()
        key = id(module), name
        if microbatch < 0 or module not in self._modules:
            attribute.store(module, value)
            self._mine(microbatch).pop(key, None)
            return
        last = attribute.last(module)
        if self.homes.is_elsewhere(module, name) or not same(last, value):
            self.homes.touch(module, name)
        self._note_update(module, name, last, value, microbatch)
        attribute.store(module, value)
        self._contents.note_set(key, value)
        self._own.setdefault(microbatch, {})[key] = value
        self.setters.note(key, microbatch)

    def forget(self, module: nn.Module, name: str) -> None:
        """Before an attribute is deleted."""
        microbatch = _lamina.microbatch()
        if microbatch >= 0 and module in self._modules:
            self.homes.touch(module, name)
        self._mine(microbatch).pop((id(module), name), None)

    def _guard(self, kind: type, name: str) -> None:
        """Has attributes of that name be `_Attribute`s of the class, unless the class has a property of that name."""
        default = getattr(kind, name, _MISSING)
        is_property = hasattr(default, "__set__") and not isinstance(default, MemberDescriptorType)
        if (kind, name) not in self._replaced and not is_property:
            self._replaced[kind, name] = vars(kind).get(name, _MISSING)
            setattr(kind, name, _Attribute(self, name, default))

    def _mine(self, microbatch: int) -> dict[Key, Any]:
        return self._own.get(microbatch, {}) if self._own else {}

    def _note_update(self, module: nn.Module, name: str, last: Any, value: Any, microbatch: int) -> None:
        """Raises UsageError where another microbatch has set the attribute since the update that ends here read it."""
        key = id(module), name
        read = self._updated.get(microbatch, {}).pop(key, _MISSING)
        if not updates_here(_user(), name):
            self._anew.setdefault(microbatch, set()).add(key)
        elif isinstance(read, (numbers.Number, torch.Tensor)) and not same(read, last) and not same(last, value):
            raise UsageError(
                f"{self._modules.path(module, name)} was set by another microbatch between the reading and the setting "
                f"of it by microbatch {microbatch}, which waited for another rank in between: call modules of other "
                "ranks before the statement that updates it, or set active_microbatches to 1",
                code="step-update-torn",
            )


class _Attribute(InPlaceOfValue):
    """An attribute of the modules of one class.

    Args:
        kept: the attributes of the model.
        name: of the attribute. What was set last is in the module's dictionary, where torch has it, or in its slot.
        default: what the class has, for a module that has none; of one with a slot that.
    """

    def __init__(self, kept: Attributes, name: str, default: Any):
        self._kept = kept
        self.name = name
        self._slot = default if isinstance(default, MemberDescriptorType) else None
        self._default = default if self._slot is None else _MISSING
        self.of_class = None if default is _MISSING else default

    @compiled.outside
    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is None:
            return self._of_class(None, kind)
        if self._kept.homes.is_elsewhere(module, self.name):
            self._kept.homes.refuse_to_read(module, self.name)
        value = self._kept.read(module, self)
        return self._of_class(module, kind) if value is _MISSING else value

    @compiled.outside
    def __set__(self, module: nn.Module, value: Any) -> None:
        self._kept.write(module, self, value)

    def __delete__(self, module: nn.Module) -> None:
        self._kept.forget(module, self.name)
        if self._slot is not None:
            self._slot.__delete__(module)
        elif vars(module).pop(self.name, _MISSING) is _MISSING:
            raise AttributeError(self.name)

    def last(self, module: nn.Module) -> Any:
        """The value that was set last, by whomever."""
        value = self.stored(module)
        return self._default if value is _MISSING else value

    def stored(self, module: nn.Module) -> Any:
        """Returns this without the default of the class."""
        if self._slot is None:
            return vars(module).get(self.name, _MISSING)
        try:
            return self._slot.__get__(module)
        except AttributeError:
            return _MISSING

    def store(self, module: nn.Module, value: Any) -> None:
        """Sets it, for everybody."""
        if self._slot is None:
            vars(module)[self.name] = value
        else:
            self._slot.__set__(module, value)

    def _of_class(self, module: nn.Module | None, kind: type) -> Any:
        if self._default is _MISSING:
            raise AttributeError(self.name)
        bind = getattr(type(self._default), "__get__", None)
        return self._default if bind is None else bind(self._default, module, kind)


def _is_plain(module: nn.Module, name: str, value: Any) -> bool:
    """True where it is no parameter, buffer or submodule, nor one of torch's own."""
    state = vars(module)
    kept = any(name in state.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
    return not kept and not isinstance(value, (nn.Parameter, nn.Module, nn.Buffer))


def _user() -> FrameType:
    """The frame of the script that reads or sets an attribute."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return frame
