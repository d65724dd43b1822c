# SPDX-License-Identifier: Apache-2.0
"""docs/porting.md: what works is there, with these arguments and defaults; what does not is an error."""

import ast
import inspect
import pathlib
import pickle
import re

import pytest
import torch
from docs.raised import ROOT

import lamina
import smdistributed.modelparallel.torch as smp

# Names that scripts of the original use, and what its documents name; keys of the configuration have a page of their
# own.
UNION = pathlib.Path(__file__).with_name("original_names.txt").read_text().split()


def rows():
    for line in (ROOT / "docs/porting.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                yield name, cells[1].strip("`"), cells[2]


ROWS = list(rows())


@pytest.fixture
def objects(monkeypatch):
    """Beginnings of names with a dot that are no modules."""
    for name in ("RANK", "WORLD_SIZE", "SM_HP_MP_PARAMETERS"):
        monkeypatch.delenv(name, raising=False)
    lamina.init(microbatches=1)
    model = lamina.distribute(torch.nn.Linear(1, 1))
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    output = lamina.step(lambda: torch.ones(1))()
    parameter = next(model.parameters())
    yield {"DistributedModel": model, "optimizer": optimizer, "StepOutput": output, "parameter": parameter}
    lamina.shutdown()


def found(name, objects):
    first, _, rest = name.partition(".")
    thing = objects[first] if rest and first in objects else getattr(smp, first)
    for part in rest.split(".") if rest else ():
        thing = getattr(thing, part)
    return thing


def test_every_name_of_the_original_has_one_row():
    assert sorted(set(UNION) - {name for name, _, _ in ROWS}) == []
    assert len({name for name, _, _ in ROWS}) == len(ROWS) >= len(UNION)
    assert {status for _, _, status in ROWS} == {"same", "differs", "not yet", "sharded"}


def arguments(text):
    """[(name, kind, default)] of a list of arguments."""
    tree = ast.parse(f"def f({text}): pass").body[0].args
    names = [argument.arg for argument in tree.args]
    defaults = [inspect.Parameter.empty] * (len(names) - len(tree.defaults))
    known = {"pickle": pickle, "WORLD": lamina.WORLD}
    for default in tree.defaults:
        defaults.append(known[default.id] if isinstance(default, ast.Name) else ast.literal_eval(default))
    several = [(tree.kwarg.arg, None)] if tree.kwarg else []
    return [*zip(names, defaults, strict=True), *several]


@pytest.mark.parametrize("name, text", [(name, text) for name, text, status in ROWS if status in ("same", "differs")])
def test_what_works_is_there_with_its_arguments_and_defaults(objects, name, text):
    thing = found(name, objects)
    if not text:
        return
    parameters = inspect.signature(thing).parameters
    for argument, default in arguments(text):
        if default is None and parameters[argument].kind is inspect.Parameter.VAR_KEYWORD:
            continue
        assert parameters[argument].default == default, argument


@pytest.mark.parametrize("name", [name for name, _, status in ROWS if status == "not yet"])
def test_what_is_not_there_yet_says_so(objects, name):
    with pytest.raises(AttributeError):
        found(name, objects)
