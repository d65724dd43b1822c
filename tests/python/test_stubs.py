# SPDX-License-Identifier: Apache-2.0
"""The stubs of the engine say what the module has: its names, their parameters and defaults. stubtest of mypy would
compare names alone: pybind11 tells parameters nowhere but in docstrings."""

import ast
import re

import pytest
from docs.raised import ROOT

from lamina import _lamina

STUBS = ast.parse((ROOT / "python/lamina/_lamina.pyi").read_text())
# A Protocol is for type checkers alone.
CLASSES = {
    node.name: node
    for node in STUBS.body
    if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases)
}
SIGNATURE = re.compile(r"^(?:\d+\. )?(\w+\(.*\) -> .*)$", re.MULTILINE)
NOT_OF_PYBIND = {"call_in_stream"}  # it takes any words, as the interpreter hands them over


def stubbed(body: list[ast.stmt]) -> dict[str, list[ast.FunctionDef]]:
    """Each name that is defined there with its signatures, of which attributes have none."""
    found = {}
    for node in body:
        if isinstance(node, ast.AnnAssign):
            found[node.target.id] = []
        elif isinstance(node, ast.FunctionDef):
            is_called = all(ast.unparse(each) == "overload" for each in node.decorator_list)
            found.setdefault(node.name, []).extend([node] if is_called else [])
    return found


def there(holder: object) -> dict[str, list[ast.FunctionDef]]:
    """Names of a module or class of pybind11, with their signatures."""
    found = {}
    for name in vars(holder):
        value = getattr(holder, name)
        lines = SIGNATURE.findall(value.__doc__ or "") if callable(value) else []
        if not isinstance(value, type) and (lines or not name.startswith("_")):
            found[name] = [ast.parse(f"def {line.replace('::', '.')}: ...").body[0] for line in lines]
    return found


def parameters(function: ast.FunctionDef) -> list[tuple[str, str, object]]:
    """Name, kind and default of each."""

    def default(node: ast.expr | None) -> object:
        try:
            value = node and ast.literal_eval(node)
        except ValueError:
            return ast.unparse(node)
        return ("a default", list(value) if isinstance(value, tuple) else value) if node else None

    arguments = function.args
    places = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(places) - len(arguments.defaults)) + arguments.defaults
    told = [(each.arg, "place", default(value)) for each, value in zip(places, defaults, strict=True)]
    for kind, rest in (("places", arguments.vararg), ("keywords", arguments.kwarg)):
        told += [(rest.arg, kind, None)] if rest else []
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return told + [(each.arg, "keyword", default(value)) for each, value in by_name]


def is_as_stubbed(stub: ast.FunctionDef, real: ast.FunctionDef) -> bool:
    """Parameters that pybind11 was told no name for, arg0 and so on, are given by their places alone."""
    ours, theirs = parameters(stub), parameters(real)
    unnamed = [bool(re.fullmatch(r"arg\d+", name)) for name, _, _ in theirs]
    return len(ours) == len(theirs) and all(
        each[nameless:] == other[nameless:] for each, other, nameless in zip(ours, theirs, unnamed, strict=True)
    )


def differences(body: list[ast.stmt], holder: object) -> list[str]:
    stubs, real = stubbed(body), there(holder)
    for names, others in ((stubs, real), (real, stubs)):  # a constructor without arguments may be left out
        if "__init__" not in others and all(len(parameters(each)) == 1 for each in names.get("__init__", [])):
            names.pop("__init__", None)
    # Attributes that pybind11's class looks up when they are asked for.
    found = [f"{name} is not in the stubs" for name in real if name not in stubs and name != "__getattr__"]
    found += [f"{name} is in the stubs alone" for name in stubs if name not in real and "__getattr__" not in real]
    for name in stubs.keys() & real.keys() - NOT_OF_PYBIND:
        same = len(stubs[name]) == len(real[name]) and all(map(is_as_stubbed, stubs[name], real[name]))
        found += [] if same else [f"{name} takes " + " or ".join(ast.unparse(each.args) for each in real[name])]
    return found


def test_the_module_has_what_the_stubs_say():
    assert differences(STUBS.body, _lamina) == []
    assert sorted(CLASSES) == sorted(name for name, value in vars(_lamina).items() if isinstance(value, type))


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_what_the_stubs_say(name):
    assert differences(CLASSES[name].body, getattr(_lamina, name)) == []


def test_the_configuration_has_the_keys_of_its_stub():
    config, _, _ = _lamina.parse_config("{}")
    keys = [node.target.id for node in CLASSES["Config"].body if isinstance(node, ast.AnnAssign)]
    assert keys and [key for key in keys if not hasattr(config, key)] == []


@pytest.mark.parametrize(
    "wrong",
    ["def told(): ...", "def told(name, more): ...", "def told(name=None): ...", "def told(*, name): ...", "told: int"],
)
def test_a_stub_that_says_otherwise_is_found(wrong):
    right = {name: each for each in STUBS.body if (name := getattr(each, "name", None))}
    body = [each for each in STUBS.body if each is not right["told"]] + ast.parse(wrong).body
    assert [line.split()[0] for line in differences(body, _lamina)] == ["told"]
