# SPDX-License-Identifier: Apache-2.0
"""run_cases.py [NAME=VALUE]... SUBJECT...: a rank of a job on emulated accelerators (tests/emulated), which runs the
cases of the subjects, with these variables of the environment."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "build/emulated"))

if __name__ == "__main__":
    os.environ.update(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    sys.argv[1:] = [word for word in sys.argv[1:] if "=" not in word]
    import emulated  # noqa: F401 -- makes the devices known to torch, as the environment says
    from multiprocess.run_cases import main

    main("devices")
