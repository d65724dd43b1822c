# SPDX-License-Identifier: Apache-2.0
"""Keys of a configuration: each is read by a table, and all that is wrong is collected."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lamina.composer.precision import Precision
from lamina.errors import ConfigError
from lamina.util.checks import nearest

# A reader takes a value, and returns what it means; its ValueError says what is wrong. With the default it is an entry.
Table = Mapping[str, tuple[Callable[[Any], Any], Any]]
UNHEEDED = object()  # what a value means that changes no result

_DTYPES = {
    torch.float32: ("fp32", "float32", "torch.float32"),
    torch.float16: ("fp16", "float16", "torch.float16", "half", "amp", "amp_fp16"),
    torch.bfloat16: ("bf16", "bfloat16", "torch.bfloat16", "bfloat", "amp_bf16"),
}


class Findings(list[str]):
    """Problems of a configuration, all of them.

    Attributes:
        unheeded: keys that were given, and that change no result here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unheeded: list[str] = []


def read(where: str, given: Any, table: Table, problems: Findings) -> dict[str, Any]:
    """The values of a configuration, with the table's defaults for what is not there or wrong.

    Args:
        where: the configuration's name, for problems.
        given: the configuration.
        table: readers and defaults by key.
        problems: gets what is wrong.
    """
    values = {key: default for key, (_, default) in table.items()}
    if not isinstance(given, Mapping):
        problems.append(f"{where}: {given!r} is not allowed; expected a dictionary")
        return values
    for key, value in given.items():
        if key not in table:
            problems.append(f"{where}[{key!r}]: no key is called so; {_alike(key, table)}")
            continue
        try:
            values[key] = table[key][0](value)
            if values[key] is UNHEEDED:
                problems.unheeded.append(f"{where}[{key!r}]")
        except ValueError as error:
            problems.append(f"{where}[{key!r}]: {error}")
    return values


def raise_problems(problems: list[str]) -> None:
    """Raises a ConfigError with all of them, if there are any."""
    if problems:
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        raise ConfigError("\n  ".join([f"configuration of the Trainer: {count}", *problems]))


def one_of(*names: str) -> Callable[[Any], str]:
    """Reads one of these names, in any case of its letters."""

    def reader(value: Any) -> str:
        if isinstance(value, str) and value.upper() in names:
            return value.upper()
        raise _not_allowed(value, f"one of {', '.join(names)}; the nearest is {nearest(value, names)}")

    return reader


def number(least: float, most: float = math.inf, whole: bool = False) -> Callable[[Any], Any]:
    """Reads a number of at least, and at most, so much, which may be a text.

    Args:
        least, most: the smallest and the largest one.
        whole: whether it has to be a whole number.
    """
    limits = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"

    def reader(value: Any) -> Any:
        try:
            found = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
        except (ValueError, OverflowError):
            found = math.nan
        if math.isinf(found) or not least <= found <= most or (whole and not found.is_integer()):
            raise _not_allowed(value, f"a {'whole ' * whole}number, {limits}")
        return int(found) if whole else found

    return reader


def flag(value: Any) -> bool:
    """Reads true or false."""
    found = {"true": True, "false": False}.get(str(value).lower()) if isinstance(value, bool | str) else None
    if found is None:
        raise _not_allowed(value, "True or False")
    return found


def section(value: Any) -> Mapping:
    """Reads a dictionary, whose keys have a table of their own."""
    if not isinstance(value, Mapping):
        raise _not_allowed(value, "a dictionary")
    return value


def dtype(value: Any) -> torch.dtype | None:
    """Reads a dtype, its name or a Precision; None is none."""
    if value is None:
        return None
    text = value.value if isinstance(value, Precision) else str(value).lower()
    for found, names in _DTYPES.items():
        if text in names and isinstance(value, str | torch.dtype):
            return found
    raise _not_allowed(value, f"fp32, fp16 or bf16; the nearest is {nearest(text, ('fp32', 'fp16', 'bf16'))}")


def unheeded(value: Any) -> object:
    """Reads what changes no result, whatever it is."""
    return UNHEEDED


def unheeded_as(read_it: Callable[[Any], Any]) -> Callable[[Any], object]:
    """Reads what changes no result, where it is what that reader takes."""
    return lambda value: unheeded(read_it(value))


def only(expected: Any, why: str) -> Callable[[Any], Any]:
    """Reads this value alone, or a text of it: any other changes a result, and is an error for that reason."""

    def reader(value: Any) -> Any:
        if value is not None and str(value).lower() not in (str(expected).lower(), str(expected).removesuffix(".0")):
            raise ValueError(f"{value!r}: {why}; expected {expected!r}")
        return expected

    return reader


def absent(why: str) -> Callable[[Any], None]:
    """Reads what says no: all else is an error, for that reason."""

    def reader(value: Any) -> None:
        said = value
        if isinstance(value, Mapping):
            said = next((value[key] for key in ("device", "enabled") if key in value), True)
        if str(said).lower() not in ("none", "false"):
            raise ValueError(f"{value!r}: {why}")

    return reader


def _alike(key: Any, table: Table) -> str:
    found = nearest(key, table, 0.6)
    return f"the nearest is {found}" if found else f"there are {', '.join(table)}"


def _not_allowed(value: Any, expected: str) -> ValueError:
    return ValueError(f"{value!r} is not allowed; expected {expected}")
