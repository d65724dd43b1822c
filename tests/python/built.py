# SPDX-License-Identifier: Apache-2.0
"""Extension modules that are made for tests alone: see CMakeLists.txt."""

import importlib.util
from pathlib import Path

import lamina  # noqa: F401 -- the engine, which they are linked with

ROOT = Path(__file__).resolve().parents[2]


def library(file):
    """The path of the one of that name that was built last."""
    return max(ROOT.glob(f"build/*/*/{file}"), key=lambda path: path.stat().st_mtime)


def extension(name):
    """The module of that name that was built last."""
    built = library(f"{name}.*.so")
    spec = importlib.util.spec_from_file_location(name, built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
