# SPDX-License-Identifier: Apache-2.0
"""Names of metrics. Classes of torchmetrics have had several: its `Accuracy` is a `MulticlassAccuracy` now."""

from collections.abc import Iterable
from typing import Any

_KINDS = ("Binary", "Multiclass", "Multilabel")


def other_name(name: Any, names: Iterable[str]) -> str | None:
    """The one of these names that is of the same metric: with the kind of its classes before it, or without. A path
    before the name, as loggers have it, is the same. None where there is none, or where several are."""
    path, slash, own = str(name).rpartition("/")
    plain = next((own.removeprefix(kind) for kind in _KINDS if own.startswith(kind)), own)
    known = {f"{path}{slash}{each}" for each in (plain, *(kind + plain for kind in _KINDS))}
    found = [each for each in names if each in known and each != name]
    return found[0] if len(found) == 1 and plain else None


class MetricsByName(dict[str, Any]):
    """Metrics, or their values, that are found by both of their names."""

    def __missing__(self, name: str) -> Any:
        if (other := other_name(name, self)) is None:
            raise KeyError(name)
        return self[other]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or other_name(name, self) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """As a dictionary's, by either name."""
        try:
            return self[name]
        except KeyError:
            return default
