# SPDX-License-Identifier: Apache-2.0
"""nn.Modules as the engine calls them: by number, under the state of the rank that called."""

import base64
import json
from typing import Any

from torch import nn

from lamina import _lamina
from lamina.calls.arguments import ArgumentCheck, is_unchanging
from lamina.calls.changes import BorrowedArguments, CallResult, unpacked, write_back
from lamina.errors import UsageError
from lamina.job import current
from lamina.model.partitioned import PartitionedModel
from lamina.modules.runs import Run
from lamina.modules.slots import Parts, Slots
from lamina.shared_state.watch import Watch
from lamina.torch_patches import module_call

_UNIFORM = (b"\x00", b"\x01")
_END = b"\x02"  # of the training flags


class RemoteCalls:
    """Both ends of the calls of a model's modules.

    Args:
        model: who owns what of it.
        slots: where its parameters and buffers are.
        state: watches the state of the script around it.
    """

    def __init__(self, model: PartitionedModel, slots: Slots, state: Watch):
        self._model, self._slots, self._state = model, slots, state
        self._borrowed = BorrowedArguments()
        self._parts: dict[int, Parts] = {}  # by number; for one step or more, while no parameter is replaced

    def forget_parts(self) -> None:
        """Parameters have been replaced."""
        self._parts.clear()

    def run(self, number: int, state: bytes, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs module `number`, which this rank owns, under the `state` that `capture` gave on another rank.

        Returns:
            What it returns; when it changed arguments that are no tensors, a `CallResult` as it travels.

        Errors:
            UsageError: it put something into an argument that cannot be sent back. And whatever it raises.
        """
        module, name = self._model.callee(number), self._name(number)
        caller, variables, flags = self._hear(state)
        self._apply_modes(number, flags)
        check = ArgumentCheck(module, name, args, kwargs)
        try:
            with self._state.serving(name, variables):
                output = module(*args) if isinstance(module, Run) else module_call.call_here(module, args, kwargs)
            self._state.look()
        finally:
            self._hear_answers(current.session())
            if news := self._state.news_for(caller):
                _lamina.leave_note(json.dumps(news).encode())
        changed = check.changed()
        return CallResult(output, changed).packed() if changed else output

    def call(self, session: _lamina.Session, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls module `number`, which another rank owns, in a step; see [Note: changes].

        Errors:
            UsageError: it changed an argument that cannot be changed here. And whatever it raises.
        """
        lent = [value for value in (*args, *kwargs.values()) if not is_unchanging(value)]
        if not lent:
            return self._called(session, number, args, kwargs)
        with self._borrowed.lend(lent):
            result = self._called(session, number, args, kwargs)
            if (changed := unpacked(result)) is None:
                return result
            try:
                return write_back(changed, args, kwargs, self._borrowed)
            except UsageError as error:
                named = UsageError(f"{self._name(number)}: {error}")
                named.code = error.code
                raise named from None

    def capture(self, number: int) -> bytes:
        """Returns what a call of module `number` depends on besides its arguments. First a line: who calls, what the
        owner has not heard of the homes of attributes, and context variables. Then come flags: whether it and all under
        it are in training, one byte when they are equal, else one per module. Then follow those of its parameters that
        are to be trained, and the number of the conversion that set their dtypes."""
        is_anywhere = id(self._model.callee(number)) in self._model.anywhere  # then it is not known who will run it
        news = [] if is_anywhere else self._state.news_for(self._model.callee_owner(number))
        told = json.dumps(news).encode() if news else b"[]"
        variables = base64.b64encode(self._state.variables())
        return b'[%d,%b,"%b"]\n' % (self._model.partition, told, variables) + self._flags(number)

    def _flags(self, number: int) -> bytes:
        modules, parameters, elsewhere = self._parts_of(number)
        for slot, tensor in elsewhere:
            if slot.held.get(slot.key) is not tensor:
                raise UsageError(self._replaced_text(number, slot.name), code="step-replaced")
        training = bytes([module.training for module in modules])
        uniform = _UNIFORM[training[0]]
        trained = bytes([parameter.requires_grad for parameter in parameters])
        conversion = b"%d" % self._model.conversions
        return (uniform if training == uniform * len(training) else training) + _END + trained + conversion

    def _parts_of(self, number: int) -> Parts:
        """Module `number` and all under it, their parameters, and the places of what other ranks own of it."""
        if number not in self._parts:
            module = self._model.callee(number)
            modules = list(module.modules())
            elsewhere = self._slots.of(part for part in modules if self._model.elsewhere(part) is not None)
            self._parts[number] = modules, list(module.parameters()), elsewhere
        return self._parts[number]

    def _modules_of(self, number: int) -> list[nn.Module]:
        modules, _, _ = self._parts_of(number)
        return modules

    def _replaced_text(self, number: int, replaced: str) -> str:
        return (
            f"{replaced} was replaced in a step (torch.func.functional_call, parametrize.cached() and assignments do "
            f"so), and {self._name(number)} runs on partition {self._model.callee_owner(number)}, which goes on with "
            "the one that it has: place the module in its caller's partition with set_partition, or replace it between "
            "steps, on every rank"
        )

    def _name(self, number: int) -> str:
        return self._model.callee_name(number)

    def _called(self, session: _lamina.Session, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._state.before_call(self._name(number), lambda: self._modules_of(number))
        try:
            return session.call(number, args, kwargs)
        finally:
            self._hear_answers(session)

    def _hear(self, state: bytes) -> tuple[int, bytes, bytes]:
        """Takes the first line of `capture`; returns the partition that calls, the context variables that are set
        there, and the rest."""
        line, _, rest = state.partition(b"\n")
        caller, news, variables = json.loads(line)
        self._state.hear(news)
        return caller, base64.b64decode(variables), rest

    def _hear_answers(self, session: _lamina.Session) -> None:
        for note in session.take_notes():
            self._state.hear(json.loads(note))

    def _apply_modes(self, number: int, flags: bytes) -> None:
        modules = self._modules_of(number)
        modes = flags.partition(_END)[0]
        if len(modes) == 1:
            modes = modes * len(modules)
        for part, training in zip(modules, modes, strict=True):
            if part.training != bool(training):
                part.training = bool(training)
