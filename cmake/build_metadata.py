# SPDX-License-Identifier: Apache-2.0
"""The dependency on torch in the package's metadata (pyproject.toml): in a wheel the minor version that its engine was
compiled with, in an sdist all that lamina compiles with. A front end such as pip asks for it before it builds, so
tools that are missing are told here, in one line."""

import importlib.metadata
import importlib.util
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

_SUPPORTED = re.search(r"LAMINA_TORCHES (\d+\.\d+)\.\.\.(\d+\.\d+)\)", Path("CMakeLists.txt").read_text()).groups()


def _requirement(oldest: str, newest: str) -> str:
    major, minor = newest.split(".")
    return f"torch>={oldest},<{major}.{int(minor) + 1}"


def _require_tools() -> None:
    lacks = [name for name in ("cmake", "ninja") if not shutil.which(name) and not importlib.util.find_spec(name)]
    if lacks:
        raise SystemExit(f"lamina is compiled here, which takes {' and '.join(lacks)}: `pip install {' '.join(lacks)}`")


def _installed_torch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "lamina is compiled for the torch that it will run with, and there is none where it is built: "
            f"`pip install scikit-build-core '{_requirement(*_SUPPORTED)}'`, then `pip install --no-build-isolation` it"
        ) from None


class Provider:
    """Implements scikit-build-core's dynamic metadata."""

    def build_state(self, state: str) -> None:
        self._state = state

    def dynamic_metadata(self, settings: Mapping, project: Mapping) -> dict[str, list[str]]:
        if self._state == "sdist":
            return {"dependencies": [_requirement(*_SUPPORTED)]}
        _require_tools()
        minor = ".".join(_installed_torch().split(".")[:2])
        return {"dependencies": [_requirement(minor, minor)]}

    def dynamic_wheel(self, settings: Mapping) -> dict[str, bool]:
        return {"dependencies": True}
