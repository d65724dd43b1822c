# SPDX-License-Identifier: Apache-2.0
"""Extension modules that are made for tests alone: see CMakeLists.txt."""

import importlib.util

from launch.launcher_harness import built

import lamina  # noqa: F401 -- the engine, which they are linked with


def extension(name):
    """The module of that name that was built last."""
    spec = importlib.util.spec_from_file_location(name, built(f"*/{name}.*.so"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
