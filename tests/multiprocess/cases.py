# SPDX-License-Identifier: Apache-2.0
import importlib
from collections.abc import Callable


def cases(*subjects: str, package: str = "multiprocess") -> dict[str, Callable[[], None]]:
    """The functions `case_...` that cases_SUBJECT.py of a folder of tests define, in their order. No two of a launch
    have one name."""
    found: dict[str, Callable[[], None]] = {}
    for subject in subjects:
        name = f"{package}.cases_{subject}"
        for case, function in vars(importlib.import_module(name)).items():
            if case.startswith("case_"):
                assert case not in found, f"{name} has {case}, as another of {subjects} does"
                found[case] = function
    return {case.removeprefix("case_"): function for case, function in found.items()}
