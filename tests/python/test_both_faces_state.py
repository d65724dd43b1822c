# SPDX-License-Identifier: Apache-2.0
"""States of optimizers in both faces: what is saved in each form goes on, or is refused, alike on all ranks.

The C++ side is tests/frontend/states.cc, the Python one states.py.
"""

import os
import subprocess
from pathlib import Path

from launch.launcher_harness import built, command

REFUSED = {
    "parts_of_another_rank": "state-other-optimizer",
    "parts_where_states_are_whole": "state-other-optimizer",
    "parts_of_more_partitions": "state-other-optimizer",
    "parts_on_one_rank_and_the_whole_on_another": "state-mixed",
    "parts_that_lack_a_parameter": "state-other-optimizer",
    "parts_with_one_too_many": "state-other-optimizer",
    "what_does_not_fit_on_one_rank": "state-other-optimizer",
    "what_does_not_fit_before_the_cut": "state-other-optimizer",
    "a_save_while_another_one_waits": "state-before-cut",
}


def outcomes(folder, face, *program):
    ran = subprocess.run(
        [command(), "run", "-n", "2", *program],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"STATES_FOLDER": str(folder), "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [line for rank in (0, 1) for line in (folder / f"{face}_of_{rank}").read_text().splitlines()]
    return dict(line.split("\t", 1) for line in lines)


def test_states_go_on_and_are_refused_alike_in_both_faces(tmp_path):
    program = built("bin/frontend_states")
    ours = outcomes(tmp_path, "python", Path(__file__).with_name("states.py"))
    theirs = outcomes(tmp_path, "cpp", "-c", program)
    assert not {"nothing", "differs"} & set(ours.values())
    assert ours == theirs
    refused = {case: outcome.rpartition("[")[2][:-1] for case, outcome in ours.items() if outcome.endswith("]")}
    assert refused == {f"{case} on {rank}": code for case, code in REFUSED.items() for rank in (0, 1)}
