# SPDX-License-Identifier: Apache-2.0
import importlib
from collections.abc import Callable


def cases(module_name: str) -> dict[str, Callable[[], None]]:
    """The functions `case_...` of a module, in their order."""
    members = vars(importlib.import_module(module_name))
    return {name.removeprefix("case_"): case for name, case in members.items() if name.startswith("case_")}
