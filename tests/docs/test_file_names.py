# SPDX-License-Identifier: Apache-2.0
"""Files that comments name are there, docs/architecture.md has a row for each folder and package, and a folder of tests
is one of a package."""

import io
import re
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = [
    ROOT / each for each in ("", "lamina", "python", "python/lamina", "python/bindings", "tests", "apps", "scripts")
]
OTHERS = ("torch/", "Lib/")  # files of torch and of Python
NAMED = re.compile(r"(?<![\w./<-])((?:\w+/)+\w+\.(?:h|cc|py|md|cmake|sh))\b")
TABLE = re.compile(r"^\| `(\w+)`", re.MULTILINE)


def sources():
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "*.h", "*.cc", "*.py"], capture_output=True, text=True)
    return [ROOT / each for each in listed.stdout.split() if not each.startswith("docs/")]


def comments(path):
    """The comments of a file, and its docstrings, each with its line."""
    text = path.read_text()
    if path.suffix != ".py":
        for number, line in enumerate(text.splitlines(), 1):
            if (found := re.search(r"(?<!:)//(.*)", line)) is not None:
                yield number, found[1]
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and token.string.lstrip("rR").startswith('"""')
        ):
            yield token.start[0], token.string


def is_there(named, source):
    return any((place / named).exists() for place in (*PLACES, *source.parents))


def test_files_that_comments_name_are_there():
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {named}"
        for path in sources()
        for line, comment in comments(path)
        for named in NAMED.findall(comment)
        if not named.startswith(OTHERS) and not is_there(named, path)
    ]
    assert not missing


def test_the_architecture_has_a_row_for_each_folder_and_package():
    rows = TABLE.findall((ROOT / "docs/architecture.md").read_text())
    folders = [each.parent.name for each in (ROOT / "lamina").glob("*/CMakeLists.txt")]
    packages = [each.parent.name for each in (ROOT / "python/lamina").glob("*/__init__.py")]
    assert sorted({*folders, *packages} - set(rows)) == []
    assert len(folders) > 30 and len(packages) > 20


def test_a_folder_of_tests_is_one_of_a_package():
    tested = {path.parent.name for path in (ROOT / "tests/python").glob("*/test_*.py")}
    assert tested and not [name for name in tested if not (ROOT / "python/lamina" / name).is_dir()]
