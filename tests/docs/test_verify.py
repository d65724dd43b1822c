# SPDX-License-Identifier: Apache-2.0
"""The example of docs/verify.md says what the page shows."""

import re
import shlex
import subprocess

import pytest
from docs.raised import ROOT
from launch.launcher_harness import PRELOAD

BLOCKS = re.findall(r"^```(\w+) ?(.*?)\n(.*?)^```$", (ROOT / "docs/verify.md").read_text(), re.MULTILINE | re.DOTALL)


def shows(page: str, printed: str) -> bool:
    """True where each line is as the page has it; `...` stands for anything, counts of tensors are any."""
    any_count = re.sub(r"\d+ tensors", "N tensors", page.strip())
    pattern = ".*".join(re.escape(part) for part in any_count.split("..."))
    return re.fullmatch(pattern, re.sub(r"\d+ tensors", "N tensors", printed.strip()), re.DOTALL) is not None


@pytest.mark.multiprocess
def test_the_example_says_what_the_page_shows(launcher):
    printed = ""
    for language, options, text in BLOCKS:
        if language == "python":
            (launcher.folder / options.removeprefix("file=")).write_text(text)
        elif language == "text":
            assert shows(text, printed), printed
        else:
            *before, last = text.strip().splitlines()
            for line in before:
                subprocess.run(shlex.split(line), cwd=launcher.folder, check=True)
            result = launcher.run("verify", *PRELOAD, *shlex.split(last)[2:])
            assert result.returncode == int(options.removeprefix("exit=") or 0), result.stderr
            printed = result.stdout
