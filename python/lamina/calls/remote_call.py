# SPDX-License-Identifier: Apache-2.0
"""nn.Modules as the engine calls them: by number, under the state of the rank that called."""

import json
from typing import Any

from lamina import _lamina
from lamina.calls.arguments import ArgumentCheck, is_unchanging
from lamina.calls.changes import BorrowedArguments, CallResult, unpacked, write_back
from lamina.errors import UsageError
from lamina.job import current
from lamina.modules.runs import Run
from lamina.modules.slots import Parts
from lamina.shared_state import closures, variables
from lamina.torch_patches import module_attributes, module_call, swapping

_UNIFORM = (b"\x00", b"\x01")
_END = b"\x02"  # of the training flags
_borrowed = BorrowedArguments()


def run_module(number: int, state: bytes, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs module `number`, which this rank owns, under the `state` that `capture_state` gave on another rank.

    Returns:
        What it returns; when it changed arguments that are no tensors, a `CallResult` as it travels.

    Errors:
        UsageError: it put something into an argument that cannot be sent back. And whatever it raises.
    """
    module = current.job().cut.model.callee(number)
    caller, set_by_caller, state = _hear(state)
    _apply_state(number, state)
    check = ArgumentCheck(module, _name(number), args, kwargs)
    try:
        with module_attributes.serving(_name(number)), variables.set_here(set_by_caller, _name(number)):
            output = module(*args) if isinstance(module, Run) else module_call.call_here(module, args, kwargs)
        closures.look()
    finally:
        _hear_answers(current.session())
        if news := module_attributes.news_for(caller):
            _lamina.leave_note(json.dumps(news).encode())
    changed = check.changed()
    return CallResult(output, changed).packed() if changed else output


def call_remote(session: _lamina.Session, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls module `number`, which another rank owns, in a step; see [Note: changes].

    Errors:
        UsageError: it changed an argument that cannot be changed here. And whatever it raises.
    """
    lent = [value for value in (*args, *kwargs.values()) if not is_unchanging(value)]
    if not lent:
        return _called(session, number, args, kwargs)
    with _borrowed.lend(lent):
        result = _called(session, number, args, kwargs)
        if (changed := unpacked(result)) is None:
            return result
        try:
            return write_back(changed, args, kwargs, _borrowed)
        except UsageError as error:
            named = UsageError(f"{_name(number)}: {error}")
            named.code = error.code
            raise named from None


def capture_state(number: int) -> bytes:
    """Returns what a call of module `number` depends on besides its arguments. First a line: who calls, what the owner
    has not heard of the homes of attributes, and context variables. Then flags: whether it and all under it are in
    training, one byte when they are equal, else one per module; then which of its parameters are to be trained, and of
    which conversion of the model's dtypes they are."""
    model = current.job().cut.model
    is_anywhere = id(model.callee(number)) in model.anywhere  # then it is not known here who will run it
    news = [] if is_anywhere else module_attributes.news_for(model.callee_owner(number))
    told = json.dumps(news).encode() if news else b"[]"
    return b'[%d,%b,"%b"]\n' % (model.partition, told, variables.captured().encode()) + _flags(number)


def _flags(number: int) -> bytes:
    modules, parameters, elsewhere = _parts(number)
    for slot, tensor in elsewhere:
        if slot.held.get(slot.key) is not tensor:
            raise UsageError(_replaced_text(number, slot.name), code="step-replaced")
    training = bytes([module.training for module in modules])
    uniform = _UNIFORM[training[0]]
    trained = bytes([parameter.requires_grad for parameter in parameters])
    conversion = b"%d" % current.job().cut.model.conversions
    return (uniform if training == uniform * len(training) else training) + _END + trained + conversion


def _parts(number: int) -> Parts:
    """Module `number` and all under it, their parameters, and the places of what other ranks own of it."""
    cut = current.job().cut
    if number not in cut.model.parts:
        module = cut.model.callee(number)
        modules = list(module.modules())
        elsewhere = cut.slots.of(part for part in modules if cut.model.elsewhere(part) is not None)
        cut.model.parts[number] = modules, list(module.parameters()), elsewhere
    return cut.model.parts[number]


def _replaced_text(number: int, replaced: str) -> str:
    return (
        f"{replaced} was replaced in a step (torch.func.functional_call, parametrize.cached() and assignments do so), "
        f"and {_name(number)} runs on partition {current.job().cut.model.callee_owner(number)}, which goes on with "
        "the one that it has: place the module in its caller's partition with set_partition, or replace it between "
        "steps, on every rank"
    )


def _name(number: int) -> str:
    return current.job().cut.model.callee_name(number)


def _called(session: _lamina.Session, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
    closures.look()
    if swapping.caches():
        swapping.refuse_cached(_name(number), _parts(number)[0])
    try:
        return session.call(number, args, kwargs)
    finally:
        _hear_answers(session)


def _hear(state: bytes) -> tuple[int, str, bytes]:
    """Takes the first line of `capture_state`; returns the partition that calls, the context variables that are set
    there, and the rest."""
    line, _, rest = state.partition(b"\n")
    caller, news, set_by_caller = json.loads(line)
    module_attributes.hear(news)
    return caller, set_by_caller, rest


def _hear_answers(session: _lamina.Session) -> None:
    for note in session.take_notes():
        module_attributes.hear(json.loads(note))


def _apply_state(number: int, state: bytes) -> None:
    modules, _, _ = _parts(number)
    flags = state.partition(_END)[0]
    if len(flags) == 1:
        flags = flags * len(modules)
    for part, training in zip(modules, flags, strict=True):
        if part.training != bool(training):
            part.training = bool(training)
