# SPDX-License-Identifier: Apache-2.0
"""Answers `lamina plan --model`: a model's modules and their costs, as the file that `lamina plan` reads.

The model is built with fake tensors, so that one that no machine has room for can be planned on a laptop. Where it
cannot be built or traced so, it is built as it is. No ranks are started.
"""

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lamina.errors import Error, UsageError
from lamina.exits.frames import hide_ours
from lamina.modules.tree import ModuleTree
from lamina.planning import others
from lamina.planning.first_rank import FirstRank, as_wrapped
from lamina.tracing.record import WritesParameterError
from lamina.tracing.sandbox import Call
from lamina.tracing.trace import TraceOptions, trace
from lamina.util.told import print_text, tell


def plan_of(
    build: Callable[[], Any], inputs: list[str], times: bool = False, rank: FirstRank | None = None
) -> dict[str, Any]:
    """Members of a plan's file for the model that `build` returns, called with `inputs` (see `arguments`): its "nodes",
    and "slices" where layers are cut.

    Args:
        rank: the first one of the job that is planned for; None for one whose layers are whole.

    Errors:
        UsageError: it returns no module, an input is no Python, the model cannot be called with the inputs, or a plan
            of slices does not fit it. What `build` raises.
    """
    notes: list[str] = []
    rank = rank or FirstRank()
    for mode in ([] if times else [FakeTensorMode(allow_non_fake_inputs=True)]) + [nullcontext()]:
        real = not isinstance(mode, FakeTensorMode)
        try:
            with mode:
                model, cut = as_wrapped(_module(build()), rank)
                call = Call(*arguments(inputs))
        except UsageError:
            raise
        except Exception as error:
            if real:
                raise
            notes.append(f"it cannot be built without memory ({type(error).__name__}: {error}): it is built as it is")
            continue
        tree = ModuleTree(model)
        found = trace(tree, call, TraceOptions(times=times))
        if found.measures is not None or real:
            notes += found.notes
            break
    if inputs and found.measures is None and not isinstance(found.error, WritesParameterError):
        raise UsageError("the model cannot be called with what --input gives") from found.error
    for note in notes:
        tell(note)
    nodes = [_row(row) for row in tree.filled().rows(found.measures)[0]]
    slices = {"slices": {"ranks": rank.group_size("tp"), "layers": cut}} if cut else {}
    return {"nodes": nodes} | slices


def arguments(inputs: list[str], **known: Any) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call: each input is a Python expression, in which torch and `known` are, or NAME=EXPRESSION.

    Errors:
        UsageError: it is neither, or it raises.
    """
    args, kwargs = [], {}
    for text in inputs:
        name, equals, rest = text.partition("=")
        named = bool(equals) and name.strip().isidentifier() and not rest.startswith("=")
        try:
            value = eval(rest if named else text, {"torch": torch} | known)
        except Exception as error:
            raise UsageError(f"--input {text!r}: {type(error).__name__}: {error}") from error
        if named:
            kwargs[name.strip()] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def find(name: str) -> Callable[[], Any]:
    """The callable of "package.module:callable"; modules are looked for in the current folder, too, after all
    other places: it may hold files of anybody, with names such as json.py.

    Errors:
        UsageError: there is none.
    """
    module, colon, path = name.partition(":")
    if not colon or not path:
        raise UsageError(f"--model {name!r}: expected MODULE:CALLABLE, such as package.models:build")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--model {name!r}: {error}") from None
    if isinstance(found, nn.Module):
        raise UsageError(f"--model {name!r}: it is a model already; give a function or a class that returns one")
    if not callable(found):
        raise UsageError(f"--model {name!r}: it is no callable, but {type(found).__name__}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="lamina plan", description="Prints what a plan's file has of a model.")
    parser.add_argument("--model", required=True, help="MODULE:CALLABLE; the callable returns the model")
    parser.add_argument("--input", action="append", default=[], help="an argument of one microbatch: [NAME=]EXPRESSION")
    parser.add_argument("--times", action="store_true", help="run the model and measure, instead of counting")
    parser.add_argument("--partitions", type=int, default=1, help="ranks of a pipeline")
    parser.add_argument("--tensor-parallel-degree", type=int, default=1, help="ranks that layers are cut over")
    parser.add_argument("--prescaled-batch", action="store_true", help="these ranks read one batch")
    parser.add_argument("--optimize", default="memory", help="memory or speed")
    given = parser.parse_args()
    try:
        with redirect_stdout(sys.stderr):
            plan = _planned(given)
        print(json.dumps(plan)[1:-1])
    except Exception as error:
        _show(error)
        return 2
    return 0


def _planned(given: argparse.Namespace) -> dict[str, Any]:
    build = find(given.model)
    planner = others.planner()
    if planner is None:
        rank = FirstRank(given.tensor_parallel_degree, given.partitions, given.prescaled_batch, given.optimize)
        return plan_of(build, given.input, given.times, rank)
    for name, differs in (("times", given.times), ("tensor-parallel-degree", given.tensor_parallel_degree > 1)):
        if differs:
            raise UsageError(f"--{name} is for models of torch alone")
    return {"nodes": [_row(row) for row in planner(build, given.input)], "graph": True}


def _show(error: Exception) -> None:
    """One line; before it, what the user's own code raised, from where the user's code begins."""
    theirs = error.__cause__ if isinstance(error, Error) else error
    if theirs is not None:
        hide_ours(theirs)
        print_text("".join(traceback.format_exception(theirs)).rstrip("\n"))
    said = str(error) if isinstance(error, Error) else f"--model: {type(error).__name__}: {error}".splitlines()[0]
    print_text(f"lamina plan: {said}")


def _module(built: Any) -> nn.Module:
    if not isinstance(built, nn.Module):
        raise UsageError(f"--model: the callable returned no module, but {type(built).__name__}")
    return built


def _row(row: dict[str, Any]) -> dict[str, Any]:
    row["parent"] = None if row["parent"] < 0 else row["parent"]
    return {key: value for key, value in row.items() if key != "placed_at" and value != []}


if __name__ == "__main__":
    sys.exit(main())
