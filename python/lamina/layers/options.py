# SPDX-License-Identifier: Apache-2.0
"""Arguments of transformers' layers: the engine has a table of them, see lamina/layers/options.h."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from lamina import _lamina

Kind = TypeVar("Kind", bound=type[nn.Module])


def takes_options(kind: Kind) -> Kind:
    """A decorator of a class whose `__init__` takes the arguments of the engine's table: its signature says them."""
    parameter = inspect.Parameter
    parameters = [parameter("self", parameter.POSITIONAL_OR_KEYWORD)]
    for name, default, takes_place in _lamina.layer_arguments(kind.__name__):
        by = parameter.POSITIONAL_OR_KEYWORD if takes_place else parameter.KEYWORD_ONLY
        parameters.append(parameter(name, by, default=default))
    kind.__init__.__signature__ = inspect.Signature(parameters)  # type: ignore[misc]
    return kind


def options_of(kind: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a transformer, with the arguments that a class of its layers is called with.

    Errors:
        TypeError: an argument that the class does not take.
        UsageError: a value that an option cannot have.
    """
    try:
        given = inspect.signature(kind).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{kind.__name__}(): {error}") from None
    return _lamina.layer_options(kind.__name__, given)


def arguments(kind: type[nn.Module], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a class of layers takes."""
    return {name: options[name] for name, *_ in _lamina.layer_arguments(kind.__name__)}
