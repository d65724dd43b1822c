# SPDX-License-Identifier: Apache-2.0
"""Becomes `lamina run` with the words that were given to `composer`."""

import os
import shutil
import sys


def command() -> str:
    """$LAMINA_COMMAND where others may not write there, the command beside this interpreter, else the first in PATH."""
    if named := os.environ.get("LAMINA_COMMAND"):
        _require_own(named)
        return named
    beside = os.path.join(os.path.dirname(sys.executable), "lamina")
    found = beside if os.access(beside, os.X_OK) else shutil.which("lamina")
    if not found:
        sys.exit(f"composer: no command lamina beside {sys.executable} or in PATH: install lamina there")
    return found


def _require_own(named: str) -> None:
    from lamina import _lamina  # which takes seconds to import
    from lamina.errors import ConfigError

    try:
        _lamina.require_own_code(named, "LAMINA_COMMAND")
    except ConfigError as error:
        sys.exit(f"composer: {error}")


def main():
    program = command()
    if os.path.dirname(program) != os.path.dirname(sys.executable):  # beside which it finds this interpreter itself
        os.environ.setdefault("LAMINA_PYTHON", sys.executable)
    os.execv(program, [program, "run", *sys.argv[1:]])


if __name__ == "__main__":
    main()
