# SPDX-License-Identifier: Apache-2.0
"""Scripts for the original on TensorFlow: they run unchanged over ranks, to the numbers of one process."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("lamina_operators") is None,
        reason="takes TensorFlow and lamina's operators for it: make test-tensorflow",
    ),
    pytest.mark.timeout(1300),
]
DEADLINE_S = 1200.0  # as in test_ranks.py
HERE = Path(__file__).parent
ENVIRONMENT = {"LAMINA_PYTHON": sys.executable, "TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTEROP_THREADS": "1"}


def run(launcher, program, *arguments, ranks=2, **environment):
    words = ["run", "-n", ranks, HERE / program, *arguments]
    ran = launcher.run(*words, env=ENVIRONMENT | environment, deadline_s=DEADLINE_S)
    assert ran.returncode == 0, ran.stderr
    return ran


@pytest.mark.parametrize(
    ("dtype", "scripts"),
    [
        ("float64", ["drops", "evaluation", "copies"]),
        ("float64", ["convolutions", "compiled"]),
        ("float64", ["signature", "checkpoints", "files"]),
    ],
)
def test_scripts_compute_as_in_one_process(launcher, tmp_path, dtype, scripts):
    run(launcher, "scripts.py", tmp_path, dtype, *scripts)


def test_scripts_of_keras_2_do(launcher, tmp_path):
    scripts = ("drops", "convolutions", "signature", "checkpoints")
    run(launcher, "scripts.py", tmp_path, "float64", *scripts, TF_USE_LEGACY_KERAS="1")


@pytest.mark.parametrize(
    ("partitions", "scripts"),
    [(2, ["evaluation", "copies", "signature", "checkpoints", "files"]), (4, ["drops", "convolutions", "signature"])],
)
def test_scripts_do_on_four_ranks(launcher, tmp_path, partitions, scripts):
    run(launcher, "scripts.py", tmp_path, "float64", *scripts, ranks=4, PARTITIONS=str(partitions))


@pytest.mark.parametrize("case", ["interface", "errors", "layouts"])
def test_names_that_scripts_use(launcher, tmp_path, case):
    run(launcher, "cases_scripts.py", case, tmp_path)
