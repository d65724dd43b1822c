# SPDX-License-Identifier: Apache-2.0
"""merge_wheels.py OUT WHEEL...: one wheel of lamina with the engines of several, each for another torch, into folder
OUT. All else in them has to be the same. Its metadata takes the versions of torch that it has an engine for."""

import filecmp
import re
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

from auditwheel.wheeltools import InWheel

ENGINE = re.compile(r"torch(\d+)\.(\d+)")


def engines(tree: Path) -> dict[tuple[int, int], Path]:
    return {
        tuple(map(int, found.groups())): folder
        for folder in (tree / "lamina").iterdir()
        if (found := ENGINE.fullmatch(folder.name))
    }


def shared_files(tree: Path) -> dict[Path, Path]:
    """Files besides engines, what names them and their stubs, by their paths in the wheel: torches write types in
    other ways."""
    files = {path.relative_to(tree): path for path in tree.rglob("*") if path.is_file()}
    return {
        name: path
        for name, path in files.items()
        if name.name not in ("METADATA", "RECORD", "_lamina.pyi") and not any(map(ENGINE.fullmatch, name.parts))
    }


def require_same(first: Path, other: Path) -> None:
    ours, theirs = shared_files(first), shared_files(other)
    if different := [name for name in ours.keys() | theirs.keys() if name not in ours or name not in theirs] or [
        name for name, path in ours.items() if not filecmp.cmp(path, theirs[name], shallow=False)
    ]:
        sys.exit(f"not of the same sources: {', '.join(sorted(map(str, different)))}")


def requirement(versions: list[tuple[int, int]]) -> str:
    """Returns the metadata's line for engines of these versions of torch."""
    (major, oldest), (last_major, newest) = versions[0], versions[-1]
    if last_major != major:
        sys.exit(
            f"torch {major} and {last_major} in one wheel: its metadata cannot say which versions lie between them"
        )
    left_out = [f",!={major}.{minor}.*" for minor in range(oldest, newest) if (major, minor) not in versions]
    return f"Requires-Dist: torch>={major}.{oldest},<{major}.{newest + 1}{''.join(left_out)}"


def main() -> None:
    out, *wheels = (Path(word).absolute() for word in sys.argv[1:])
    result = InWheel(wheels[0])
    result.zip_compression_level = 9
    with ExitStack() as opened:
        first, *others = [Path(opened.enter_context(tree)).absolute() for tree in (result, *map(InWheel, wheels[1:]))]
        for other in others:
            require_same(first, other)
            for folder in engines(other).values():
                shutil.copytree(folder, first / "lamina" / folder.name)
        (metadata,) = first.glob("*.dist-info/METADATA")
        line = requirement(sorted(engines(first)))
        text, found = re.subn(r"^Requires-Dist: torch[><=].*$", line, metadata.read_text(), flags=re.MULTILINE)
        if found != 1:
            sys.exit(f"{wheels[0]} does not say once which torch it takes")
        metadata.write_text(text)
        result.out_wheel = out / wheels[0].name  # an error leaves none
    print(result.out_wheel)


if __name__ == "__main__":
    main()
