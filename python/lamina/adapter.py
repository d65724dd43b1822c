# SPDX-License-Identifier: Apache-2.0
"""nn.Modules as the engine calls them: by number, under the state of the rank that called."""

import json
from typing import Any

from torch import nn

from lamina import _current, _lamina, attributes, closures, intercept, swapping
from lamina.arguments import ArgumentCheck, is_unchanging
from lamina.changes import Changed, Lent, adopt, unpacked
from lamina.errors import UsageError

_UNIFORM = (b"\x00", b"\x01")
_END = b"\x02"  # of the training flags
_lent = Lent()


def run_module(number: int, state: bytes, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs module `number`, which this rank owns, under the `state` that `capture_state` gave on another rank.

    Returns:
        What it returns; when it changed arguments that are no tensors, a `Changed` as it travels.

    Errors:
        UsageError: it put something into an argument that cannot be sent back. And whatever it raises.
    """
    module = _modules()[number]
    caller, state = _hear(state)
    _apply_state(number, state)
    check = ArgumentCheck(module, _name(number), args, kwargs)
    try:
        with attributes.serving(_name(number)):
            output = intercept.call_here(module, args, kwargs)
        closures.look()
    finally:
        _hear_answers()
        if news := attributes.news_for(caller):
            _lamina.leave_note(json.dumps(news).encode())
    changed = check.changed()
    return Changed(output, changed).packed() if changed else output


def call_remote(session: _lamina.Session, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls module `number`, which another rank owns, in a step; see [Note: changes].

    Errors:
        UsageError: it changed an argument that cannot be changed here. And whatever it raises.
    """
    lent = [value for value in (*args, *kwargs.values()) if not is_unchanging(value)]
    if not lent:
        return _called(session, number, args, kwargs)
    with _lent.to_a_call(lent):
        result = _called(session, number, args, kwargs)
        if (changed := unpacked(result)) is None:
            return result
        try:
            return adopt(changed, args, kwargs, _lent)
        except UsageError as error:
            raise UsageError(f"{_name(number)}: {error}") from None


def capture_state(number: int) -> bytes:
    """What a call of module `number` depends on besides its arguments. First a line: who calls, and what the owner has
    not heard of the homes of attributes. Then flags: whether it and all under it are in training, one byte when they
    are equal, else one per module; then which of its parameters are to be trained, and of which conversion of the
    model's dtypes they are."""
    model = _current.job().cut.model
    news = attributes.news_for(model.owners[number])
    told = json.dumps(news).encode() if news else b"[]"
    return b"[%d,%b]\n" % (model.partition, told) + _flags(number)


def _flags(number: int) -> bytes:
    modules, parameters = _parts(number)
    training = bytes([module.training for module in modules])
    uniform = _UNIFORM[training[0]]
    trained = bytes([parameter.requires_grad for parameter in parameters])
    conversion = b"%d" % _current.job().cut.model.conversions
    return (uniform if training == uniform * len(training) else training) + _END + trained + conversion


def _parts(number: int) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Module `number` and all under it, and their parameters."""
    model = _current.job().cut.model
    if number not in model.parts:
        module = model.tree.modules[number]
        model.parts[number] = list(module.modules()), list(module.parameters())
    return model.parts[number]


def _name(number: int) -> str:
    return _current.job().cut.model.tree.names[number] or "the model"


def _modules() -> list[nn.Module]:
    return _current.job().cut.model.tree.modules


def _called(session: _lamina.Session, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
    closures.look()
    swapping.require_own(_name(number), _parts(number)[0])
    try:
        return session.call(number, args, kwargs)
    finally:
        _hear_answers()


def _hear(state: bytes) -> tuple[int, bytes]:
    """Takes the first line of `capture_state`; returns the partition that calls, and the rest."""
    line, _, rest = state.partition(b"\n")
    caller, news = json.loads(line)
    attributes.hear(news)
    return caller, rest


def _hear_answers() -> None:
    for note in _current.session().take_notes():
        attributes.hear(json.loads(note))


def _apply_state(number: int, state: bytes) -> None:
    modules, _ = _parts(number)
    flags = state.partition(_END)[0]
    if len(flags) == 1:
        flags = flags * len(modules)
    for part, training in zip(modules, flags, strict=True):
        if part.training != bool(training):
            part.training = bool(training)
