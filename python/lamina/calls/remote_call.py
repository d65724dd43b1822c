# SPDX-License-Identifier: Apache-2.0
"""nn.Modules as the engine calls them: by number, under the state of the rank that called."""

import json
import marshal
from typing import Any, NamedTuple

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


class CallState(NamedTuple):
    """Everything that a call of a module depends on besides its arguments, and torch's own modes.

    Attributes:
        caller: the partition that calls.
        training: whether the module and all under it are in training: one byte when they are equal, else one for each.
        trained: which of its parameters are to be trained.
        conversion: of which conversion of the model's dtypes they are.
        variables: the context variables that are set there, see `ContextVariables.captured`.
        context: of the thread there, if there is any: see `CallContext.told`.
    """

    caller: int
    training: bytes
    trained: bytes
    conversion: int
    variables: bytes
    context: tuple | None

    def to_bytes(self) -> bytes:
        """As it travels: equal for equal states, which is how the engine knows a call again."""
        return marshal.dumps(tuple(self), 2)  # later versions tell how often an object is used elsewhere

    @classmethod
    def from_bytes(cls, state: bytes) -> "CallState":
        """Reads what `to_bytes` gave on another rank."""
        return cls(*marshal.loads(state))


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
        self._context = current.job().call_context
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
        module, name, told = self._model.callee(number), self._name(number), CallState.from_bytes(state)
        served = self._context.served(told.context, self._model.tree.modules)
        self._apply_modes(number, told.training)
        check = ArgumentCheck(module, name, args, kwargs)
        try:
            with self._state.serving(name, told.variables), served:
                if not isinstance(module, Run):
                    current.job().recording.record_reads(self._model.tree.names[number])
                output = module(*args) if isinstance(module, Run) else module_call.call_here(module, args, kwargs)
            self._state.look()
        finally:
            self._hear_answers(current.session())
            if news := self._state.news_for(told.caller):
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

    def capture(self, number: int) -> tuple[bytes, bytes]:
        """Returns the `CallState` of a call of module `number`, and for `hear` what its owner has not heard yet of the
        homes of attributes: a call that brings news is as any other one."""
        is_anywhere = id(self._model.callee(number)) in self._model.anywhere  # then it is not known who will run it
        news = [] if is_anywhere else self._state.news_for(self._model.callee_owner(number))
        return self._state_of(number).to_bytes(), json.dumps(news).encode() if news else b""

    def hear(self, news: bytes) -> None:
        """Takes news of another rank."""
        self._state.hear(json.loads(news))

    def _state_of(self, number: int) -> CallState:
        modules, parameters, elsewhere = self._parts_of(number)
        for slot, tensor in elsewhere:
            if slot.held.get(slot.key) is not tensor:
                raise UsageError(self._replaced_text(number, slot.name), code="step-replaced")
        training = bytes([module.training for module in modules])
        uniform = _UNIFORM[training[0]]
        trained = bytes([parameter.requires_grad for parameter in parameters])
        if training == uniform * len(training):
            training = uniform
        variables, context = self._state.variables(), self._context.told(self._model.tree.node)
        return CallState(self._model.partition, training, trained, self._model.conversions, variables, context)

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
        callee = self._model.callee(number)
        try:
            with self._context.calling(callee.parts if isinstance(callee, Run) else [callee]):
                return session.call(number, args, kwargs)
        finally:
            self._hear_answers(session)

    def _hear_answers(self, session: _lamina.Session) -> None:
        for note in session.take_notes():
            self.hear(note)

    def _apply_modes(self, number: int, training: bytes) -> None:
        modules = self._modules_of(number)
        modes = training * len(modules) if len(training) == 1 else training
        for part, mode in zip(modules, modes, strict=True):
            if part.training != bool(mode):
                part.training = bool(mode)
