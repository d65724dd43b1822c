# SPDX-License-Identifier: Apache-2.0
"""Rules of an argument, one row for each in the table of Arguments."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from lamina.composer.argument_readers import Read
from lamina.trainer import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules of an argument, beside its name, type and default.

    Attributes:
        read: gives what it stands for, see argument_readers; None: any value is taken as it is.
        refusal: why nothing but the default is taken; "" where something is.
        is_alike: whether it is compared between ranks; init compares what becomes its keys.
        beside: arguments of which one has to be there for this one to have an effect; () for none.
        key: of lamina_config, which says the same, and counts.
        of_each: the attribute of Evaluators that counts instead of it.
    """

    read: Read | None = None
    refusal: str = ""
    is_alike: bool = False
    beside: tuple[str, ...] = ()
    key: str = ""
    of_each: str = ""

    def problem(self, given: Any, default: Any) -> str:
        """Says why this value is refused; nothing where it is not."""
        is_nothing = default is None and type(given) is list and not given
        return self.refusal if self.refusal and checks.differs(given, default) and not is_nothing else ""


def argument(default: Any = dataclasses.MISSING, read: Read | None = None, **rules: Any) -> Any:
    """The field of an argument.

    Args:
        default: its default.
        read, rules: see Rules.
    """
    return dataclasses.field(default=default, metadata={"rules": Rules(read=read, **rules)})


def flag(default: bool = False, **rules: Any) -> Any:
    """The field of an argument that is True or False."""
    return argument(default, checks.flag, **rules)


def refused(default: Any, instead: str) -> Any:
    """The field of an argument of Composer's that has no sense here.

    Args:
        default: its default, which is taken.
        instead: what is there in its place.
    """
    return argument(default, refusal=f"there is none here: {instead}")


def not_yet(default: Any = None) -> Any:
    """The field of an argument that is not there yet."""
    return argument(default, refusal="is not there yet")


def rules_of(kind: type) -> dict[str, Rules]:
    """The rules of a table's arguments, by name."""
    return {field.name: field.metadata["rules"] for field in dataclasses.fields(kind)}


class GivenArguments:
    """The arguments of a call, as they were given.

    Args:
        rules: of the arguments that it has.
        given: values by name.
        defaults: those of the call.
    """

    def __init__(self, rules: Mapping[str, Rules], given: Mapping[str, Any], defaults: Mapping[str, Any]):
        self._given, self._defaults = given, defaults
        self._rules = {name: rule for name, rule in rules.items() if self._is_given(name)}

    def idle(self, evaluators: list[Any]) -> Iterator[str]:
        """Says which have no effect beside the others; none of them is refused.

        Args:
            evaluators: those that are given.
        """
        by_needs: dict[tuple[str, ...], list[str]] = {}
        for name, rule in self._rules.items():
            if rule.beside and not any(map(self._is_there, rule.beside)):
                by_needs.setdefault(rule.beside, []).append(name)
        for needs, names in by_needs.items():
            yield f"{' and '.join(names)}: no effect without {' and '.join(needs)}"
        for name, rule in self._rules.items():
            if rule.of_each and evaluators and all(getattr(each, rule.of_each) is not None for each in evaluators):
                yield f"{name}: no effect, for each Evaluator has a {rule.of_each} of its own"
        keys = self._given.get("lamina_config") or {}
        for name, rule in self._rules.items():
            if rule.key in keys and self._given[name] != keys[rule.key]:
                yield f"{name}={self._given[name]}: no effect, for lamina_config says {rule.key}: {keys[rule.key]}"
        if {"save_folder", "save_latest_filename"} <= self._rules.keys() and self._given["save_latest_filename"]:
            yield "save_latest_filename: no effect: load_path=save_folder goes on from the newest checkpoint"

    def _is_given(self, name: str) -> bool:
        """Tells whether it says something else than what holds without it."""
        return name in self._given and checks.differs(self._given[name], self._defaults[name])

    def _is_there(self, name: str) -> bool:
        value = self._given.get(name, self._defaults.get(name))
        return value is not None and value is not False and not (isinstance(value, (list, tuple)) and not value)
