# SPDX-License-Identifier: Apache-2.0
"""Extension modules that are made for tests alone: see CMakeLists.txt."""

import importlib.util
from pathlib import Path

import lamina  # noqa: F401 -- the engine, which they are linked with

ROOT = Path(__file__).resolve().parents[2]


def extension(name):
    """The one of that name that was built last."""
    built = max(ROOT.glob(f"build/*/bin/{name}.*.so"), key=lambda path: path.stat().st_mtime)
    spec = importlib.util.spec_from_file_location(name, built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
