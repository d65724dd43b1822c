# SPDX-License-Identifier: Apache-2.0
"""Runs the pinned clang-tidy on the sources of one build folder (the argument), several at once."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def main() -> int:
    build = Path(sys.argv[1])
    sources = sorted({entry["file"] for entry in json.loads((build / "compile_commands.json").read_text())})
    tidy = Path(sys.executable).parent / "clang-tidy"

    def check(source: str) -> tuple[int, str]:
        # g++'s own options that clang does not know are no finding.
        command = [tidy, "-p", build, "--quiet", "--extra-arg=-Wno-unknown-warning-option", source]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        # Without findings, standard error only counts what was suppressed in system headers.
        return done.returncode, done.stdout + (done.stderr if done.returncode else "")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(check, sources))
    for code, text in results:
        if code or text.strip():
            print(text, end="")
    return 1 if any(code for code, _ in results) else 0


if __name__ == "__main__":
    sys.exit(main())
