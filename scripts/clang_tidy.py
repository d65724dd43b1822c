# SPDX-License-Identifier: Apache-2.0
"""Runs the pinned clang-tidy on the sources of one build folder (the argument), several at once.

A source without findings is not looked at again until it, a header of ours that it includes, its command, the checks or
clang-tidy change; the cache is shared between clones, as the compiler's is.
"""

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIDY = Path(sys.executable).parent / "clang-tidy"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lamina-clang-tidy"
# g++'s own options that clang does not know are no finding.
OPTIONS = ["--quiet", "--extra-arg=-Wno-unknown-warning-option"]
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@functools.cache
def included(path: Path) -> frozenset[Path]:
    """The files of ours that a file includes itself; they are named from the repository's root."""
    return frozenset(ROOT / name for name in INCLUDE.findall(path.read_text()) if (ROOT / name).exists())


def with_headers(source: Path) -> list[Path]:
    found, new = {source}, {source}
    while new:
        new = frozenset().union(*map(included, new)) - found
        found |= new
    return sorted(found)


@functools.cache
def content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def key(source: Path, command: str, common: str) -> str:
    words = [common, command.replace(str(ROOT), "")]
    words += [f"{path.relative_to(ROOT)} {content(path)}" for path in with_headers(source)]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def check(source: Path, build: Path, mark: Path) -> tuple[int, str]:
    """The exit code and the findings. Without any, the mark is made."""
    done = subprocess.run([TIDY, "-p", build, *OPTIONS, source], capture_output=True, text=True, check=False)
    # Without findings, standard error only counts what was suppressed in system headers.
    text = done.stdout + (done.stderr if done.returncode else "")
    if not done.returncode and not text.strip():
        mark.touch()
    return done.returncode, text


def main() -> int:
    build = Path(sys.argv[1])
    commands = {Path(e["file"]): e["command"] for e in json.loads((build / "compile_commands.json").read_text())}
    version = subprocess.run([TIDY, "--version"], capture_output=True, text=True, check=True).stdout
    common = "\n".join([version, *OPTIONS, (ROOT / ".clang-tidy").read_text()])
    clean = {source: CACHE / key(source, command, common) for source, command in sorted(commands.items())}
    sources = [source for source, mark in clean.items() if not mark.exists()]
    CACHE.mkdir(parents=True, exist_ok=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda source: check(source, build, clean[source]), sources))
    print("".join(text for _, text in results), end="")
    return 1 if any(code for code, _ in results) else 0


if __name__ == "__main__":
    sys.exit(main())
