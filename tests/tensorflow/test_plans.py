# SPDX-License-Identifier: Apache-2.0
"""`lamina plan --model` of models of TensorFlow."""

import importlib.util
import json
import re
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
DEADLINE_S = 600.0  # as in test_ranks.py
HERE = Path(__file__).parent
MODULE = """
import sys
sys.path.insert(0, "{here}")
import lamina.tensorflow as smp
import tensorflow as tf
from models import made

def transformer():
    return made("transformer", smp.DistributedModel)

def nothing():
    return None

if __name__ == "__main__":
    smp.init(partitions=2, microbatches=4)
    model = transformer()
    smp.step(lambda x: model(x, training=True))(tf.zeros([8, 6], tf.int64))
    smp.shutdown()
"""
INPUT = "tf.zeros([2, 6], tf.int64)"


@pytest.fixture
def plan(launcher):
    (launcher.folder / "planned.py").write_text(MODULE.format(here=HERE))
    environment = {"LAMINA_PYTHON": sys.executable, "TF_CPP_MIN_LOG_LEVEL": "2"}

    def run(name, *arguments):
        words = ["plan", "--model", f"planned:{name}", "-n", "2", "-m", "4", *arguments]
        return launcher.run(*words, env=environment, deadline_s=DEADLINE_S)

    run.environment = environment
    return run


def items(text):
    """The names in a plan's line."""
    line = re.search(r"Partition assignments: {(.*)}", text)
    assert line, text
    return sorted(name for names in re.findall(r"\[(.*?)\]", line[1]) for name in names.split(", "))


def test_it_plans_the_items_of_a_job(plan, launcher):
    planned = plan("transformer", "--input", INPUT, "--input", "training=True")
    assert planned.returncode == 0, planned.stderr
    job = launcher.run("run", "-n", 2, launcher.folder / "planned.py", env=plan.environment, deadline_s=DEADLINE_S)
    assert job.returncode == 0, job.stderr
    assert items(planned.stdout) == items(job.stdout + job.stderr)


def test_the_bytes_of_all_variables_are_in_it(plan):
    planned = plan("transformer", "--input", INPUT, "--json")
    assert planned.returncode == 0, planned.stderr
    stages = json.loads(planned.stdout)["stages"]
    # Float64: words and places; per block two norms, attention, and two dense layers; a norm and the last layer.
    block = 2 * 2 * 16 + 4 * (16 * 16 + 16) + (16 * 32 + 32) + (32 * 16 + 16)
    assert sum(each["bytes"] for each in stages) == 8 * (20 * 16 + 6 * 16 + 3 * block + 2 * 16 + 16 * 5 + 5)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("transformer", (), "say with --input what it is called with"),
        ("transformer", ("--input", INPUT, "--times"), "--times is for models of torch alone"),
        ("nothing", ("--input", INPUT), "the callable returned no DistributedModel, but NoneType"),
    ],
)
def test_what_cannot_be_planned_is_said(plan, name, arguments, words):
    planned = plan(name, *arguments)
    assert planned.returncode == 2
    assert words in planned.stderr
