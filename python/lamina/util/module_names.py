# SPDX-License-Identifier: Apache-2.0
"""Names of modules in a model."""


def is_in_module(name: str, module: str) -> bool:
    """Tells whether a name is that of a module, or of something inside of it; all is inside of "", the model."""
    return not module or name == module or name.startswith(f"{module}.")
