# SPDX-License-Identifier: Apache-2.0
"""Classes that have another one in their place where their modules are marked.

A registration is kept in the class itself, and the arguments that a module was made with in the module.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from lamina.errors import UsageError
from lamina.tensor_parallel.correspondence import Correspondence

_REGISTRATION = "_lamina_registration"
_ARGUMENTS = "_lamina_made_with"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Hook = Callable[..., Any]
Kind = TypeVar("Kind", bound=type[nn.Module])


class DistributedModule(nn.Module):
    """The base of modules that have their layers cut over the ranks of TP_GROUP when their model is wrapped, marked or
    not. They are made of whole layers, and say how these are cut.

    Attributes:
        slicing_plan: a style for names below the module, as `set_tensor_parallelism(plan=...)` takes them.
        is_stack: whether activations between the modules inside may lie in parts of positions.
        positions_plan: the styles of a module in such a stack then; see [Note: positions].
    """

    slicing_plan: ClassVar[Mapping[str, str]] = {}
    is_stack: ClassVar[bool] = False

    @property
    def positions_plan(self) -> Mapping[str, str]:
        return {}

    def as_plain(self, output: torch.Tensor) -> torch.Tensor:
        """Returns an output of a call as it is with one rank, for `lamina verify`."""
        return output


class UnfitError(Exception):
    """A module cannot become another one, for this reason; it stays what it is."""


@dataclass(frozen=True)
class Registration:
    """The class that modules of another one become.

    Attributes:
        kind: that class.
        init_hook, forward_hook, return_hook: see `tp_register`.
        correspondence: whose values its parameters get; without any they are new.
        arguments_of: the arguments that a module was made with.
    """

    kind: type[DistributedModule]
    init_hook: Hook | None = None
    forward_hook: Hook | None = None
    return_hook: Hook | None = None
    correspondence: Correspondence = ()
    arguments_of: Callable[[nn.Module], Arguments] | None = None


def tp_register(
    dist_module: type[DistributedModule],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
    *,
    correspondence: Correspondence = (),
) -> Callable[[Kind], Kind]:
    """A decorator of a class of modules: those that are marked become another class when their model is wrapped.

    Args:
        dist_module: that class.
        init_hook: takes the arguments of the original's `__init__`, and returns those of `dist_module`'s: a tuple, and
            a dictionary of named ones. None: they are the same. Its signature is that of the original's, without self.
        forward_hook: the same for `forward`.
        return_hook: takes what the `forward` of `dist_module` returns, and returns what the original's does.
        correspondence: rows that say which parameters of the original have the values that `dist_module` begins with;
            without, it begins with those of its own.

    Errors:
        UsageError: no such classes, or a hook with another signature.
    """

    def register(module_cls: Kind) -> Kind:
        tp_register_with_module(
            module_cls, dist_module, init_hook, forward_hook, return_hook, correspondence=correspondence
        )
        return module_cls

    return register


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[DistributedModule],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
    *,
    correspondence: Correspondence = (),
) -> None:
    """As `tp_register`, for a class that is there. Modules that were made before stay what they are.

    Args:
        module_cls: the original.
        dist_module, init_hook, forward_hook, return_hook, correspondence: see `tp_register`.

    Errors:
        UsageError: no such classes, or a hook with another signature.
    """
    if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):
        raise UsageError(f"tp_register() is for classes of modules, not {module_cls!r}", code="tp-register")
    if not (isinstance(dist_module, type) and issubclass(dist_module, DistributedModule)):
        raise UsageError(
            f"{module_cls.__name__} is registered with {dist_module!r}, which is no class below "
            "lamina.nn.DistributedModule",
            code="tp-register",
        )
    _require_signature("init_hook", init_hook, module_cls, "__init__")
    _require_signature("forward_hook", forward_hook, module_cls, "forward")
    if return_hook is not None and not callable(return_hook):
        raise UsageError(f"return_hook of {module_cls.__name__} is no function: {return_hook!r}", code="tp-register")
    if _REGISTRATION not in vars(module_cls):
        _keep_arguments(module_cls)
    registration = Registration(dist_module, init_hook, forward_hook, return_hook, tuple(correspondence))
    setattr(module_cls, _REGISTRATION, registration)


def registration_of(module: nn.Module) -> Registration | None:
    """Returns that of a module's very class; None for none."""
    return vars(type(module)).get(_REGISTRATION)


def arguments_of(module: nn.Module, registration: Registration) -> Arguments:
    """The arguments that a module was made with.

    Errors:
        UnfitError: it was made before its class was registered.
    """
    if registration.arguments_of is not None:
        return registration.arguments_of(module)
    if _ARGUMENTS not in vars(module):
        raise UnfitError("it was made before its class was registered")
    return vars(module)[_ARGUMENTS]


def require_pair(what: str, found: Any) -> Arguments:
    """Errors: UsageError: a hook has returned no arguments."""
    is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)
    if not is_pair or not hasattr(found[0], "__iter__"):
        raise UsageError(f"{what} returns a pair of arguments and named arguments, not {found!r}", code="tp-register")
    return tuple(found[0]), dict(found[1])


def signature_of(method: Callable[..., Any]) -> inspect.Signature:
    """Returns that of a method as it is called of an object: without self."""
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _keep_arguments(kind: type[nn.Module]) -> None:
    original = kind.__init__

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is kind:
            self.__dict__[_ARGUMENTS] = (args, kwargs)

    kind.__init__ = init  # type: ignore[misc]


def _require_signature(name: str, hook: Hook | None, kind: type[nn.Module], method: str) -> None:
    if hook is None:
        return
    wanted = signature_of(getattr(kind, method))
    try:
        given = inspect.signature(hook)
    except (TypeError, ValueError):
        given = None
    if given is None or _compared(given) != _compared(wanted):
        raise UsageError(
            f"{name} of {kind.__name__} has the arguments {_said(given)}, and {kind.__name__}.{method} has "
            f"{_said(wanted)}: both have to be the same, in order, names and defaults",
            code="tp-register",
        )


def _compared(signature: inspect.Signature) -> list[tuple[str, Any, str]]:
    """Names, kinds and defaults of arguments; defaults are compared as they are written."""
    return [(each.name, each.kind, repr(each.default)) for each in signature.parameters.values()]


def _said(signature: inspect.Signature | None) -> str:
    if signature is None:
        return "of no function"
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(inspect.Signature(plain))
