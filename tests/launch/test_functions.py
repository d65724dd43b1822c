# SPDX-License-Identifier: Apache-2.0
"""`lamina.launch`: a function on several ranks, which a program starts."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, lamina

def rank_and(a, b):
    return int(os.environ["RANK"]), os.environ["WORLD_SIZE"], a + b

def raises():
    if os.environ["RANK"] == "1":
        raise KeyError("no such key")
    import time
    time.sleep(300)

if __name__ == "__main__":
    print(lamina.launch(rank_and, 2, 1, b=2))
    try:
        lamina.launch(raises, 2)
    except KeyError as error:
        print(isinstance(error, lamina.RemoteError), error.rank, "in raises" in error.remote_traceback)
"""
WRONG = """
import os, lamina
for call in ((lambda: 1, 2), (max, 0), (os._exit, 2, 3), (os._exit, 1, 0)):
    try:
        lamina.launch(*call)
    except lamina.Error as error:
        print(error.code or error)
"""


def run(folder, text, *words):
    path = folder / "script.py"
    path.write_text(text)
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "elsewhere"}  # of this process, in another job
    command = [sys.executable, *(words or [path])]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=250, env=kept | place, cwd=folder
    )


@pytest.mark.multiprocess
def test_a_function_of_a_script_runs_on_ranks_and_its_results_and_errors_come_back(tmp_path):
    result = run(tmp_path, SCRIPT)
    assert result.stdout.splitlines() == ["[(0, '2', 3), (1, '2', 3)]", "True 1 True"], result.stderr


@pytest.mark.multiprocess
def test_what_cannot_be_launched_is_told(tmp_path):
    result = run(tmp_path, "import sys\nsys.modules['cloudpickle'] = None\n" + WRONG, "-")
    told = result.stdout.splitlines()
    assert told == [f"run-function-{each}" for each in ("pickle", "ranks", "failed", "failed")], (
        result.stdout + result.stderr
    )
