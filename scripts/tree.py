# SPDX-License-Identifier: Apache-2.0
"""The files of the checkout that git tracks, or would."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tracked(*suffixes: str, below: str = ".") -> list[Path]:
    """Their paths from the root."""
    command = ["git", "ls-files", "-zco", "--exclude-standard", below]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    names = [Path(name) for name in listed.stdout.split("\0")]
    return [name for name in names if name.suffix in suffixes and (ROOT / name).exists()]
