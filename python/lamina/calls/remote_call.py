# SPDX-License-Identifier: Apache-2.0
"""nn.Modules as the engine calls them: by number, under the state of the rank that called."""

import json
import marshal
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from lamina import _lamina
from lamina.calls.arguments import UNCHANGING_TYPES, ArgumentCheck, is_unchanging
from lamina.calls.changes import BorrowedArguments, CallResult, unpacked, write_back
from lamina.errors import UsageError
from lamina.job import current, parts
from lamina.model.partitioned import PartitionedModel
from lamina.modules.runs import Run
from lamina.modules.slots import Slot, Slots
from lamina.shared_state.watch import Watch
from lamina.torch_patches import module_call

# Reads of a flag that no function of Python makes: there is one for each module, or parameter, of a call.
_TRAINING = operator.attrgetter("training")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


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


@dataclass
class _Callee:
    """A module that is called between ranks, and what stays so from call to call.

    Attributes:
        module, name: itself.
        owner: the partition that owns it; None where it is not known who will run it.
        modules, parameters: it and all under it, and their parameters.
        elsewhere: the places of what other ranks own of it, with what was there when the step began.
        captured: the state of the last call from here as it travels, and what it was made of.
        told: the state of the last call of another rank, as it came and read.
    """

    module: nn.Module | Run
    name: str
    owner: int | None
    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    elsewhere: list[tuple[Slot, Any]]
    captured: tuple[tuple, bytes] = ((), b"")
    told: tuple[bytes, CallState | None] = (b"", None)


class RemoteCalls:
    """Both ends of the calls of a model's modules.

    What is read for each call anew is read here without functions of Python of its own where there is nothing to tell:
    a call costs little more than the interpreter takes for these.

    Args:
        model: who owns what of it.
        slots: where its parameters and buffers are.
        state: watches the state of the script around it.
    """

    def __init__(self, model: PartitionedModel, slots: Slots, state: Watch):
        self._model, self._slots, self._state = model, slots, state
        self._borrowed = BorrowedArguments()
        self._job = current.job()
        self._context = self._job.call_context
        self._has_context = type(self._context) is not parts.CallContext
        self._callees: dict[int, _Callee] = {}  # by number; for one step or more, while no parameter is replaced

    def forget_parts(self) -> None:
        """Parameters have been replaced."""
        self._callees.clear()

    def run(self, number: int, state: bytes, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs module `number`, which this rank owns, under the `state` that `capture` gave on another rank.

        Returns:
            What it returns; when it changed arguments that are no tensors, a `CallResult` as it travels.

        Errors:
            UsageError: it put something into an argument that cannot be sent back. And whatever it raises.
        """
        callee = self._callees.get(number) or self._callee(number)
        before, told = callee.told
        if told is None or before != state:
            told = CallState.from_bytes(state)
            callee.told = state, told
        self._apply_modes(callee.modules, told.training)
        check = None
        if not UNCHANGING_TYPES.issuperset(map(type, (*args, *kwargs.values()))):
            check = ArgumentCheck(callee.module, callee.name, args, kwargs)
        try:
            if self._has_context:
                with self._context.served(told.context, self._model.tree.modules):
                    output = self._state.serve(callee.name, told.variables, self._run_here, number, args, kwargs)
            else:
                output = self._state.serve(callee.name, told.variables, self._run_here, number, args, kwargs)
            self._state.look()
        finally:
            for note in self._job.session.take_notes():
                self.hear(note)
            if news := self._state.news_for(told.caller):
                _lamina.leave_note(json.dumps(news).encode())
        changed = None if check is None else check.changed()
        return CallResult(output, changed).packed() if changed else output

    def call(self, session: _lamina.Session, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls module `number`, which another rank owns, in a step; see [Note: changes].

        Errors:
            UsageError: it changed an argument that cannot be changed here. And whatever it raises.
        """
        values = (*args, *kwargs.values())
        if UNCHANGING_TYPES.issuperset(map(type, values)):
            return self._called(session, number, args, kwargs)
        lent = [value for value in values if not is_unchanging(value)]
        with self._borrowed.lend(lent):
            result = self._called(session, number, args, kwargs)
            if (changed := unpacked(result)) is None:
                return result
            try:
                return write_back(changed, args, kwargs, self._borrowed)
            except UsageError as error:
                named = UsageError(f"{self._callee(number).name}: {error}")
                named.code = error.code
                raise named from None

    def capture(self, number: int) -> tuple[bytes, bytes]:
        """Returns the `CallState` of a call of module `number`, and for `hear` what its owner has not heard yet of the
        homes of attributes: a call that brings news is as any other one. The state is made anew when it has changed."""
        callee = self._callees.get(number) or self._callee(number)
        news = [] if callee.owner is None else self._state.news_for(callee.owner)
        for slot, tensor in callee.elsewhere:
            if slot.held.get(slot.key) is not tensor:
                raise UsageError(self._replaced_text(callee, number, slot.name), code="step-replaced")
        training = bytes(map(_TRAINING, callee.modules))
        if training.count(training[:1]) == len(training):
            training = training[:1]
        trained = bytes(map(_REQUIRES_GRAD, callee.parameters))
        variables = self._state.variables()
        context = self._context.told(self._model.tree.node) if self._has_context else None
        made_of = training, trained, self._model.conversions, variables, context
        before, state = callee.captured
        if context is not None or before != made_of:  # a context may be equal to another one and travel otherwise
            state = CallState(self._model.partition, *made_of).to_bytes()
            callee.captured = made_of, state
        return state, json.dumps(news).encode() if news else b""

    def hear(self, news: bytes) -> None:
        """Takes news of another rank."""
        self._state.hear(json.loads(news))

    def _callee(self, number: int) -> _Callee:
        if number not in self._callees:
            module = self._model.callee(number)
            modules = list(module.modules())
            self._callees[number] = _Callee(
                module,
                self._model.callee_name(number),
                None if id(module) in self._model.anywhere else self._model.callee_owner(number),
                modules,
                list(module.parameters()),
                self._slots.of(part for part in modules if self._model.elsewhere(part) is not None),
            )
        return self._callees[number]

    def _replaced_text(self, callee: _Callee, number: int, replaced: str) -> str:
        return (
            f"{replaced} was replaced in a step (torch.func.functional_call, parametrize.cached() and assignments do "
            f"so), and {callee.name} runs on partition {self._model.callee_owner(number)}, which goes on with "
            "the one that it has: place the module in its caller's partition with set_partition, or replace it between "
            "steps, on every rank"
        )

    def _called(self, session: _lamina.Session, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        callee = self._callees.get(number) or self._callee(number)
        self._state.before_call(callee.name, callee.modules)
        try:
            if not self._has_context:
                return session.call(number, args, kwargs)
            module = callee.module
            with self._context.calling(module.parts if isinstance(module, Run) else [module]):
                return session.call(number, args, kwargs)
        finally:
            for note in session.take_notes():
                self.hear(note)

    def _run_here(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        module = self._callees[number].module
        if isinstance(module, Run):
            return module(*args)
        self._job.recording.record_reads(self._model.tree.names[number])
        return module_call.call_here(module, args, kwargs)

    def _apply_modes(self, modules: list[nn.Module], training: bytes) -> None:
        if len(training) == 1:
            training *= len(modules)
        if bytes(map(_TRAINING, modules)) == training:
            return
        for part, mode in zip(modules, training, strict=True):
            if part.training != bool(mode):
                part.training = bool(mode)
