# SPDX-License-Identifier: Apache-2.0
"""Models of the transformers package, in their default configuration, give what they give whole."""

import pytest
from equivalence.launches import results

DEADLINE_S = 240
WORLDS = (2, 3)
NAMES = ("gpt2", "bert", "t5", "llama", "vit", "bart")


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_real_model_cut_is_the_model_whole(name, world):
    found = results("run_real_models.py", world, DEADLINE_S)
    assert name in found, f"it did not run: {found['launch']}"
    assert not found[name], "\n".join(found[name][:20])


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("world", WORLDS)
def test_the_launch_ends_well_and_leaves_nothing_behind(world):
    assert results("run_real_models.py", world, DEADLINE_S)["launch"] == []
