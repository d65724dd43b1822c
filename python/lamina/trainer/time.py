# SPDX-License-Identifier: Apache-2.0
"""Times of a training, counted in epochs, batches, samples, tokens or seconds."""

import dataclasses
import datetime
import enum
import functools
import numbers
import re
import types
from collections.abc import Sequence
from typing import Any

from lamina.errors import ConfigError
from lamina.trainer import checks

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?"
_CLOCK = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.IGNORECASE)
_SECONDS = 86400, 3600, 60, 1  # in what _CLOCK finds


class TimeUnit(str, enum.Enum):
    """The units of times; `DURATION` is a part of a whole training, from 0 to 1."""

    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    SECOND = "sec"
    DURATION = "dur"

    @classmethod
    def _missing_(cls, value: object) -> "TimeUnit":
        names = {word: unit for unit in cls for word in (unit.value, unit.name.lower())}
        if str(value).lower() not in names:
            raise ConfigError(f"{value!r} is no unit of times: {', '.join(unit.value for unit in cls)} are")
        return names[str(value).lower()]

    @property
    def is_whole(self) -> bool:
        """Tells whether it is counted in whole numbers."""
        return self not in (TimeUnit.DURATION, TimeUnit.SECOND)


EPOCH_OR_BATCH = TimeUnit.EPOCH, TimeUnit.BATCH
_WORD = re.compile(f"({_NUMBER})({'|'.join(unit.value for unit in TimeUnit)})", re.IGNORECASE)


@functools.total_ordering
class Time:
    """A number of epochs, batches, ...: `Time(10, "ba")`, `Time.from_timestring("10ba")`.

    It is compared with, added to and subtracted from times of its unit, their strings, and numbers. Times of other
    units may be multiplied by one in `dur`, and two of a unit divided.

    Errors:
        ConfigError: no number, part of what is counted in whole numbers, or times of different units.
    """

    def __init__(self, value: float, unit: TimeUnit | str):
        self.unit = TimeUnit(unit)
        if type(value) is not int:
            checks.number(f"the number of {_plural(self.unit)}", value)
        if self.unit.is_whole and value != int(value):
            raise ConfigError(f"{value}{self.unit.value} is not a whole number of {_plural(self.unit)}")
        self.value = int(value) if self.unit.is_whole else float(value)

    @classmethod
    def from_timestring(cls, timestring: str) -> "Time":
        """The time of a string: "160ep", "1000ba", "5e4sp", "1e9tok", "0.1dur", "1h30m", "90s"."""
        if not isinstance(timestring, str):
            raise checks.wrong("timestring", timestring, "a string")
        text = timestring.replace(",", "").strip()
        if found := _WORD.fullmatch(text):
            return cls(float(found[1]), found[2])
        if text and (found := _CLOCK.fullmatch(text)):
            parts = (int(part or 0) * seconds for part, seconds in zip(found.groups(), _SECONDS, strict=True))
            return cls(sum(parts), TimeUnit.SECOND)
        raise ConfigError(
            f"{timestring!r} is no time: 10ep (epochs), 500ba (batches), 5e4sp (samples), 1e9tok (tokens), 0.1dur (a "
            "part of the training), 1h30m and 90s are"
        )

    __class_getitem__ = classmethod(types.GenericAlias)  # Time[int] in annotations
    from_input = classmethod(lambda cls, value, unit=TimeUnit.EPOCH: ensure_time(value, unit))
    from_epoch = classmethod(lambda cls, epoch: cls(epoch, TimeUnit.EPOCH))
    from_batch = classmethod(lambda cls, batch: cls(batch, TimeUnit.BATCH))
    from_sample = classmethod(lambda cls, sample: cls(sample, TimeUnit.SAMPLE))
    from_token = classmethod(lambda cls, token: cls(token, TimeUnit.TOKEN))
    from_duration = classmethod(lambda cls, duration: cls(duration, TimeUnit.DURATION))

    def to_timestring(self) -> str:
        """The string of which `from_timestring` makes this time."""
        return f"{self.value}{self.unit.value}"

    def __repr__(self) -> str:
        return f"Time({self.value}, {self.unit!s})"

    def __str__(self) -> str:
        return self.to_timestring()

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __hash__(self) -> int:
        return hash((self.value, self.unit))

    def __eq__(self, other: object) -> bool:
        try:
            return self.value == self._value_of(other)
        except ConfigError:
            return False

    def __lt__(self, other: Any) -> bool:
        return self.value < self._value_of(other)

    def __add__(self, other: Any) -> "Time":
        return Time(self.value + self._value_of(other), self.unit)

    def __sub__(self, other: Any) -> "Time":
        return Time(self.value - self._value_of(other), self.unit)

    def __rsub__(self, other: Any) -> "Time":
        return Time(self._value_of(other) - self.value, self.unit)

    def __neg__(self) -> "Time":
        return Time(-self.value, self.unit)

    def __truediv__(self, other: Any) -> "Time":
        if isinstance(other, (int, float)):
            return Time(_rounded(self.value / other, self.unit), self.unit)
        return Time(self.value / self._value_of(other), TimeUnit.DURATION)

    def __mul__(self, other: Any) -> "Time":
        if isinstance(other, str):
            other = Time.from_timestring(other)
        if isinstance(other, numbers.Real):
            return Time(_rounded(self.value * other, self.unit), self.unit)
        if not isinstance(other, Time):
            return NotImplemented
        if TimeUnit.DURATION not in (self.unit, other.unit):
            raise ConfigError(f"{self} times {other}: one of both is to be a part of the training (dur)")
        unit = other.unit if self.unit is TimeUnit.DURATION else self.unit
        return Time(_rounded(self.value * other.value, unit), unit)

    __radd__, __rmul__, __mod__ = __add__, __mul__, lambda self, other: self.value % self._value_of(other)

    def _value_of(self, other: Any) -> float:
        """The number of a time of the same unit."""
        if isinstance(other, (int, float)):
            return other
        if isinstance(other, str):
            other = Time.from_timestring(other)
        if not isinstance(other, Time) or other.unit is not self.unit:
            raise ConfigError(f"{self} and {other!r} are not counted in the same unit")
        return other.value


def ensure_time(value: Time | str | int, unit: TimeUnit | str = TimeUnit.EPOCH) -> Time:
    """A time as it is, that of a string, or a number of `unit`."""
    if isinstance(value, Time):
        return value
    if isinstance(value, str):
        return Time.from_timestring(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return Time(value, unit)
    raise ConfigError(f"{value!r} is no time: a string such as '10ep', or a number of {_plural(TimeUnit(unit))}")


def named_time(name: str, value: Any, positive: bool = False, units: Sequence[TimeUnit] = tuple(TimeUnit)) -> Time:
    """The time that an argument gives, in epochs where it is a number.

    Args:
        name: of the argument.
        value: a Time, its string or a number of epochs.
        positive: whether it has to be above 0.
        units: those that are allowed.

    Errors:
        ConfigError: it is none, below 0, not `positive`, or of another unit than these; with the argument's name.
    """
    try:
        time = ensure_time(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if time.value < 0 or (positive and not time.value) or time.unit not in units:
        *others, last = map(_plural, units)
        least = "above 0" if positive else "0 or more"
        raise checks.wrong(name, value, f"some {', '.join(others)} or {last}, {least}")
    return time


def _rounded(value: float, unit: TimeUnit) -> float:
    return int(round(value, 6)) if unit.is_whole else value  # 0.29 of 100 is not quite 29


def _plural(unit: TimeUnit) -> str:
    if unit is TimeUnit.DURATION:
        return "parts of the training (dur)"
    return f"{unit.name.lower()}{'es' if unit is TimeUnit.BATCH else 's'}"


_COUNTED = {
    "epoch": TimeUnit.EPOCH,
    "batch": TimeUnit.BATCH,
    "sample": TimeUnit.SAMPLE,
    "token": TimeUnit.TOKEN,
    "batch_in_epoch": TimeUnit.BATCH,
    "sample_in_epoch": TimeUnit.SAMPLE,
    "token_in_epoch": TimeUnit.TOKEN,
}
_NONE = datetime.timedelta()


@functools.total_ordering
@dataclasses.dataclass(frozen=True, eq=False)
class Timestamp:
    """How far a training is: all ranks have the same. Durations are those of rank 0's clock.

    It is compared with times by their unit: `timestamp < Time(10, "ba")`, `timestamp >= "2ep"`.

    Args:
        epoch, batch, sample, token: how many have been trained.
        batch_in_epoch, sample_in_epoch, token_in_epoch: how many of them in this epoch.
        total_wct, epoch_wct, batch_wct: how long the training, this epoch, and the last batch have taken.
    """

    epoch: Any = 0
    batch: Any = 0
    sample: Any = 0
    token: Any = 0
    batch_in_epoch: Any = 0
    sample_in_epoch: Any = 0
    token_in_epoch: Any = 0
    total_wct: datetime.timedelta = _NONE
    epoch_wct: datetime.timedelta = _NONE
    batch_wct: datetime.timedelta = _NONE

    def __post_init__(self) -> None:
        for name, unit in _COUNTED.items():
            time = ensure_time(value := getattr(self, name), unit)
            if time.unit is not unit or time.value < 0:
                raise checks.wrong(f"Timestamp: {name}", value, f"a number of {_plural(unit)}, 0 or more")
            object.__setattr__(self, name, time)
        for name in ("total_wct", "epoch_wct", "batch_wct"):
            if not isinstance(value := getattr(self, name), datetime.timedelta):
                raise checks.wrong(f"Timestamp: {name}", value, "a datetime.timedelta")

    def get(self, unit: TimeUnit | str) -> Time:
        """How much of this unit has passed."""
        unit = TimeUnit(unit)
        if unit is TimeUnit.SECOND:
            return Time(self.total_wct.total_seconds(), unit)
        if unit is TimeUnit.DURATION:
            raise ConfigError("a Timestamp does not know how long the training is: State.get_elapsed_duration() does")
        return getattr(self, unit.name.lower())

    def to_next_batch(self, samples: int = 0, tokens: int = 0, duration: datetime.timedelta = _NONE) -> "Timestamp":
        """The time after one batch more of so many samples and tokens.

        Args:
            samples, tokens: of the batch, of all ranks.
            duration: how long it took.
        """
        more = {"batch": 1, "sample": int(samples), "token": int(tokens)}
        counts = {
            field: getattr(self, field) + number
            for name, number in more.items()
            for field in (name, f"{name}_in_epoch")
        }
        total, epoch = self.total_wct + duration, self.epoch_wct + duration
        return dataclasses.replace(self, **counts, total_wct=total, epoch_wct=epoch, batch_wct=duration)

    def to_next_epoch(self) -> "Timestamp":
        """The time at the beginning of the next epoch."""
        nothing = dict.fromkeys(("batch_in_epoch", "sample_in_epoch", "token_in_epoch"), 0)
        return dataclasses.replace(self, epoch=self.epoch + 1, **nothing, epoch_wct=_NONE, batch_wct=_NONE)

    def copy(self, **changes: Any) -> "Timestamp":
        """Returns the same with other fields."""
        return dataclasses.replace(self, **changes)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, by name."""
        return {
            name: value.total_seconds() if isinstance(value, datetime.timedelta) else value.value
            for name, value in vars(self).items()
        }

    def get_state(self) -> dict[str, Any]:
        """Its fields, by name."""
        return dict(vars(self))

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Timestamp":
        """The one with this `state_dict`."""
        return cls(
            **{
                name: datetime.timedelta(seconds=value) if name.endswith("_wct") else value
                for name, value in state.items()
            }
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Time, str)):
            return self._of(other) == other
        return isinstance(other, Timestamp) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __lt__(self, other: Any) -> bool:
        return self._of(other) < other

    def _of(self, other: Any) -> Time:
        """How much has passed of the other's unit."""
        if isinstance(other, (Time, str)):
            return self.get(ensure_time(other).unit)
        raise ConfigError(f"a Timestamp is compared with a time, not with {other!r}")
