# SPDX-License-Identifier: Apache-2.0
"""Objects as plain trees, which a checkpoint holds without a pickle, and back.

[Note: plain trees] None, booleans, numbers, strings, lists, tuples, dictionaries, slices, tensors, dtypes and devices
are the engine's own. Some classes that schedulers and the like keep are written as a tuple that begins with a mark and
the name of the class. Any other object stays as it is, and the engine pickles it where that is allowed.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import torch

from lamina.errors import FormatError

_MARK = "lamina.plain"
_INT64 = range(-(2**63), 2**63)
_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "int": int, "float": float, "set": set, "": None}


def to_plain(value: Any) -> Any:
    """The plain tree of a value; see [Note: plain trees]."""
    kind = type(value)
    if kind in _TO_PLAIN:
        return _TO_PLAIN[kind](value)
    if kind is torch.nn.Parameter:
        return value.detach()
    if isinstance(value, PurePath):
        return str(value)
    if kind.__module__ == "numpy":
        return _from_numpy(value)
    return value


def from_plain(value: Any) -> Any:
    """The value of a plain tree; FormatError for what `to_plain` does not make."""
    try:
        return _made(value)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise FormatError(f"a checkpoint has a value that is none: {error}") from error


def _made(value: Any) -> Any:
    kind = type(value)
    if kind is list:
        return [_made(each) for each in value]
    if kind is dict:
        return {_made(key): _made(each) for key, each in value.items()}
    if kind is not tuple:
        return value
    if len(value) == 3 and value[0] == _MARK:
        name, held = value[1:]
        if name not in _FROM_PLAIN:
            raise FormatError(f"a checkpoint has a value of the unknown kind {name!r}: read it with a newer lamina")
        return _FROM_PLAIN[name](_made(held))
    return tuple(_made(each) for each in value)


def _marked(name: str, held: Any) -> tuple[str, str, Any]:
    return (_MARK, name, to_plain(held))


def _items(value: dict) -> list[list[Any]]:
    return [[key, each] for key, each in value.items()]


def _dict(value: dict) -> Any:
    plain = [(to_plain(key), to_plain(each)) for key, each in value.items()]
    try:
        return dict(plain)
    except TypeError:  # keys of classes that are written with lists
        return (_MARK, "dict", [list(item) for item in plain])


def _tuple(value: tuple) -> tuple:
    plain = tuple(to_plain(each) for each in value)
    return (_MARK, "tuple", list(plain)) if plain[:1] == (_MARK,) else plain


def _defaultdict(value: defaultdict) -> Any:
    factory = value.default_factory
    name = "" if factory is None else getattr(factory, "__name__", "?")
    if _FACTORIES.get(name, "?") is not factory:
        return value
    return _marked("defaultdict", [name, _items(value)])


def _from_numpy(value: Any) -> Any:
    import numpy as np

    # A kind of numbers that torch has, in this machine's order of bytes.
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        value = value.astype(value.dtype.newbyteorder("="), copy=False)
        return _marked("ndarray", torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape).clone())
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return _marked("numpy", torch.from_numpy(np.array([value])).clone())
    return value


def _to_default(held: list) -> defaultdict:
    return defaultdict(_FACTORIES[held[0]], ((key, each) for key, each in held[1]))


_TO_PLAIN: dict[type, Callable[[Any], Any]] = {
    list: lambda value: [to_plain(each) for each in value],
    dict: _dict,
    tuple: _tuple,
    int: lambda value: value if value in _INT64 else _marked("int", hex(value)),
    OrderedDict: lambda value: _marked("OrderedDict", _items(value)),
    Counter: lambda value: _marked("Counter", _items(value)),
    defaultdict: _defaultdict,
    deque: lambda value: _marked("deque", [list(value), value.maxlen]),
    set: lambda value: _marked("set", list(value)),
    frozenset: lambda value: _marked("frozenset", list(value)),
    bytes: lambda value: _marked("bytes", value.hex()),
    bytearray: lambda value: _marked("bytearray", bytes(value).hex()),
    complex: lambda value: _marked("complex", [value.real, value.imag]),
    range: lambda value: _marked("range", [value.start, value.stop, value.step]),
    torch.Size: lambda value: _marked("Size", list(value)),
}

_FROM_PLAIN: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "int": lambda held: int(held, 0),
    "dict": dict,
    "OrderedDict": lambda held: OrderedDict((key, each) for key, each in held),
    "Counter": lambda held: Counter({key: each for key, each in held}),
    "defaultdict": _to_default,
    "deque": lambda held: deque(held[0], held[1]),
    "set": set,
    "frozenset": frozenset,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda held: complex(*held),
    "range": lambda held: range(*held),
    "Size": torch.Size,
    "ndarray": lambda held: held.numpy(),
    "numpy": lambda held: held.numpy()[0],
}
