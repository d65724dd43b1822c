# SPDX-License-Identifier: Apache-2.0
"""Paths of lamina.trainer from which scripts import Composer's names, though these are in lamina.composer."""

import ast
import importlib
import pickle
from pathlib import Path

import pytest

import lamina

FOLDER = Path(lamina.__file__).parent
OFFERED = sorted(path.stem for path in (FOLDER / "composer").glob("*.py") if path.stem not in ("__init__", "paths"))


@pytest.mark.parametrize("name", [*OFFERED, "loggers", "loggers.tap", "loggers.file_logger"])
def test_a_module_is_the_same_by_both_paths(name):
    assert importlib.import_module(f"lamina.trainer.{name}") is importlib.import_module(f"lamina.composer.{name}")


def test_names_need_no_import_of_their_own_and_pickles_by_the_old_path_load():
    assert lamina.trainer.schedulers.ComposerScheduler.__name__ in dir(lamina.trainer.schedulers)
    assert lamina.trainer.events.Engine is lamina.trainer.Engine
    assert lamina.trainer.state.State is lamina.trainer.State
    assert pickle.loads(b"clamina.trainer.monitors\nLRMonitor\n.").__module__ == "lamina.composer.monitors"


@pytest.mark.parametrize("name", ["nothing", "loop.nothing", "schedulers.nothing", "paths.nothing.more"])
def test_a_path_of_nothing_is_an_import_error(name):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"lamina.trainer.{name}")


def test_stubs_for_type_checkers_tell_of_what_there_is():
    stubs = {path.stem: ast.parse(path.read_text()) for path in (FOLDER / "trainer").glob("*.pyi")}
    names = {alias.name for node in stubs.pop("__init__").body for alias in getattr(node, "names", ())}
    assert names == set(lamina.trainer.__all__)
    for name, stub in stubs.items():
        (found,) = (node for node in stub.body if isinstance(node, ast.ImportFrom))
        assert (found.module, [alias.name for alias in found.names]) == (f"lamina.composer.{name}", ["*"])
        assert name == "loggers" or name in OFFERED
