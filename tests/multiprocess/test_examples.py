# SPDX-License-Identifier: Apache-2.0
"""Examples that no page runs: they learn."""

import math
import re
from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD_COMPILER

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_trainers_of_a_parameter_server_learn_a_text(launcher):
    run = launcher.run("run", *PRELOAD_COMPILER, "-n", 3, EXAMPLES / "parameter_server.py", "--steps", 80)
    assert run.returncode == 0, run.stderr
    untrained = math.log(256)  # of bytes; what rank 0 sees first may have been trained by the other
    last = float(re.search(r"loss on other text: (\d+\.\d+)", run.stdout)[1])
    assert last < 0.6 * untrained


@pytest.fixture
def printed(launcher):
    def of(*words):
        run = launcher.run("run", *PRELOAD_COMPILER, "-n", 2, EXAMPLES / words[0], *words[1:])
        assert run.returncode == 0, run.stderr
        return run.stdout

    return of


def losses(text):
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)", text, re.MULTILINE)]


def test_a_model_of_transformers_learns_to_count(printed, tmp_path):
    text = printed("hf_finetuning.py", "--steps", 30, "--out", tmp_path / "out")
    assert losses(text)[-1] < 0.5 * losses(text)[0]
    assert "goes on with [17, 20, 23, 26, 29, 32]" in text


def test_a_vision_transformer_sees_shapes(printed):
    text = printed("vit.py", "--steps", 50)
    right = [int(share) for share in re.findall(r"^step \d+: (\d+)% of", text, re.MULTILINE)]
    assert len(right) == 3 and right[0] < 45 < 55 < right[-1]  # of four shapes


def test_a_sharded_gpt_learns_and_each_rank_updates_its_share(printed):
    text = printed("sharded_gpt.py", "--steps", 20)
    assert losses(text)[-1] < 0.7 * losses(text)[0]
    whole, *shares = [int(number.replace(",", "")) for number in re.findall(r"\d+,\d+", text.splitlines()[-1])]
    assert len(shares) == 2 and max(shares) < 0.6 * whole < whole <= sum(shares)
