# SPDX-License-Identifier: Apache-2.0
"""run_case.py FILE FUNCTION ARGUMENTS...: runs a case in a process that has the emulated devices."""

import importlib
import pathlib
import sys

import torch

HERE = pathlib.Path(__file__).resolve().parent


def folder() -> pathlib.Path:
    """The folder where the module `emulated` was built for this interpreter."""
    environment = pathlib.Path(sys.prefix)
    return (HERE.parents[1] / "build" if environment.name == ".venv" else environment.parent) / "emulated"


if __name__ == "__main__":
    sys.path[:0] = [str(folder()), str(HERE)]
    import emulated  # noqa: F401 -- makes the devices known

    torch.set_num_threads(1)
    file, function, *arguments = sys.argv[1:]
    getattr(importlib.import_module(file), function)(*arguments)
