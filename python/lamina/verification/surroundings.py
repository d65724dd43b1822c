# SPDX-License-Identifier: Apache-2.0
"""Variables that the calls of a module read, which another run may find with other contents."""

import os
import random
import sys
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from lamina.model.partitioned import PartitionedModel
from lamina.script_state.kinds import is_of_the_script
from lamina.script_state.names import HOOKS, OF_TORCH, Found, Names, used_in, words_in
from lamina.script_state.uses import uses
from lamina.verification.contents import Contents

Variable = tuple[str, str, list[torch.Tensor], str]  # name, value, numbers in it, another module that uses it

# Questions to lamina and torch.distributed that each rank answers otherwise.
_ASKED = {f"{group}_{what}" for group in ("dp", "local", "mp", "pp", "rdp", "tp") for what in ("rank", "size")}
_ASKED |= {"rank", "size", "get_rank", "get_world_size"}
_WHO_ANSWERS = {"lamina", "torch.distributed"}
_OURS = "_lamina_"  # begins the names of attributes that lamina keeps in modules


class Surroundings:
    """The variables of one module's calls.

    Args:
        model: which it is part of.
        name: of the module.
    """

    def __init__(self, model: PartitionedModel, name: str):
        self._model = model
        self._name = name
        modules = model.tree.modules
        self._module: nn.Module = modules[model.tree.names.index(name)]
        self._names = Names(modules)
        self._users: dict[str, str] | None = None

    def variables(self) -> list[Variable]:
        """Returns what a call that begins now would find."""
        users = self._other_users()
        found = {}
        for name, value in (*self._of_module(), *self._of_code(), *self._of_process()):
            try:
                contents = Contents(value)
            except Exception:  # of the script's own classes, which may not be shown
                continue
            found[name] = (name, contents.text, contents.tensors, users.get(name, ""))
        return list(found.values())

    def _of_module(self) -> Iterator[tuple[str, Any]]:
        module = self._module
        yield "its training flag", module.training
        used = {name for function in self._functions() for name in used_in(function.__code__)}
        for name in (each for each in vars(module).keys() - OF_TORCH if not each.startswith(_OURS)):
            if name in used or not is_of_the_script(type(module)):
                yield f"its attribute {name}", getattr(module, name, None)
        for name, buffer in module.named_buffers(recurse=False):
            yield f"its buffer {name}", buffer
        if self._model.sharding is None:
            for name, parameter in module.named_parameters(recurse=False):
                yield f"its parameter {name}", parameter

    def _of_code(self) -> Iterator[tuple[str, Any]]:
        for found in self._found(self._module):
            value = found.read()
            if not isinstance(value, (FunctionType, ModuleType, type, nn.Module)):
                yield _called(found), value

    def _of_process(self) -> Iterator[tuple[str, Any]]:
        for function in self._functions():
            code = function.__code__
            yield from _environment(code)
            yield from _answers(function, code)
            yield from _random_numbers(function, used_in(code))

    def _found(self, module: nn.Module) -> list[Found]:
        return [found for each in _code_of(module) for found in self._names.of(each)]

    def _functions(self, module: nn.Module | None = None) -> list[FunctionType]:
        return [each for one in _code_of(module or self._module) for each in self._names.functions(one)]

    def _other_users(self) -> dict[str, str]:
        """Other modules that use the variables, by these, in words; one that writes rather than one that reads, one of
        another rank rather than one of this."""
        if self._users is None:
            mine = dict(self._used(self._module))
            tree, here = self._model.tree, self._model.owner_of(self._name)
            ranked: dict[str, tuple[bool, bool, str]] = {}
            for name, module in zip(tree.names, tree.modules, strict=True):
                is_part = f"{name}.".startswith(f"{self._name}.") or f"{self._name}.".startswith(f"{name}.")
                if not name or is_part or not is_of_the_script(type(module)):
                    continue
                owner = self._model.owner_of(name)
                for called, writes in self._used(module):
                    if called in mine:
                        where = f"{name} on rank {self._model.session.translate('partitions', owner)}"
                        user = (not writes, owner == here, f"{where} {'writes' if writes else 'uses'} it")
                        ranked[called] = min(ranked.get(called, user), user)
            self._users = {called: user for called, (_, _, user) in ranked.items()}
        return self._users

    def _used(self, module: nn.Module) -> Iterator[tuple[str, bool]]:
        """Variables that the code of a module uses, and whether it is seen to write them."""
        for found in self._found(module):
            yield _called(found), _writes(found)
        for function in self._functions(module):
            yield from ((called, False) for called, _ in _environment(function.__code__))


def _code_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The forward of a module, and the script's hooks around it and of its parameters' gradients."""
    yield module.forward
    holders = [(module, HOOKS)]
    of_parameter = ("_backward_hooks", "_post_accumulate_grad_hooks")
    holders += [(parameter, of_parameter) for parameter in module.parameters(recurse=False)]
    for holder, names in holders:
        for name in names:
            yield from (hook for hook in (getattr(holder, name, None) or {}).values() if is_of_the_script(hook))


def _environment(code: CodeType) -> Iterator[tuple[str, str | None]]:
    if used_in(code) & {"environ", "getenv"}:
        for word in words_in(code):
            if word.isidentifier() and (word in os.environ or word.isupper()):
                yield f"environment variable {word}", os.environ.get(word)


def _writes(found: Found) -> bool:
    return any(use.writes and use.name == found.word for use in uses(found.source) or ())


def _called(found: Found) -> str:
    if found.name.startswith("the default"):
        return found.name
    is_of_closure = found.name.partition(".")[0] in found.source.co_freevars
    return f"{'closure variable' if is_of_closure else 'global'} {found.name}"


def _answers(function: FunctionType, code: CodeType) -> Iterator[tuple[str, Any]]:
    """Gives what a function asks of the ranks, and the answers."""
    used = used_in(code)
    if not used & _ASKED:
        return
    for name in used & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, ModuleType) and value.__name__ == "torch" and "distributed" in used:
            name, value = f"{name}.distributed", torch.distributed
        if isinstance(value, ModuleType) and value.__name__ in _WHO_ANSWERS:
            for asked in used & _ASKED & vars(value).keys():
                yield f"{name}.{asked}()", _answer(getattr(value, asked))
        elif name in _ASKED and getattr(value, "__module__", "").partition(".")[0] in ("lamina", "torch"):
            yield f"{name}()", _answer(value)


def _random_numbers(function: FunctionType, used: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Gives where the random numbers are that a function draws from others than torch."""
    read = {id(function.__globals__[name]) for name in used & function.__globals__.keys()}
    if id(random) in read:
        yield "Python's random state", random.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None and id(numpy) in read and "random" in used:
        yield "numpy's random state", numpy.random.get_state()


def _answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        return type(error).__name__
