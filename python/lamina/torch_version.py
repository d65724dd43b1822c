# SPDX-License-Identifier: Apache-2.0
"""The version of torch that is installed, and what depends on it. The package holds one engine for each minor version
of torch that it was made for (docs/installing.md), in folders such as torch2.13. The one for this torch is chosen here,
before anything of it is loaded: another's would end in a symbol that is not found, or worse."""

import re
import sys
from pathlib import Path


def _numbers(version: str) -> tuple[int, int]:
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()
    return int(major), int(minor)


def _engine_folder(places: list[str], installed: str | None) -> str:
    """The folder below one of `places` that has the engine for torch `installed`."""
    engines = {
        _numbers(folder.name.removeprefix("torch")): str(folder)
        for place in places
        for folder in Path(place).glob("torch[0-9]*.[0-9]*")
    }
    if installed is not None and _numbers(installed) in engines:
        return engines[_numbers(installed)]
    if not engines:
        raise ImportError(f"lamina in {places[0]} has no engine: run `make build`, or install its wheel")
    held = sorted(engines)
    versions = " and ".join(f"{major}.{minor}" for major, minor in held)
    wanted = f"torch>={held[0][0]}.{held[0][1]},<{held[-1][0]}.{held[-1][1] + 1}"
    has = "none is installed" if installed is None else f"{installed} is installed"
    other = "" if installed is None else f", or take lamina's wheel for torch {'.'.join(map(str, _numbers(installed)))}"
    raise ImportError(f"this lamina was built for torch {versions}, and {has}: pip install '{wanted}'{other}")


def _installed() -> str | None:
    try:
        import torch
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        return None
    return torch.__version__


def _look_for_modules_there_too(installed: str | None) -> None:
    places = sys.modules[__package__].__path__
    places.append(_engine_folder(list(places), installed))


_INSTALLED = _installed()
_look_for_modules_there_too(_INSTALLED)

# The name of what torch.utils.checkpoint calls; from 2.14 on it goes past the older one, which others call.
CHECKPOINT = "_checkpoint_without_reentrant_generator" + ("_impl" if _numbers(_INSTALLED) >= (2, 14) else "")
