# SPDX-License-Identifier: Apache-2.0
"""Models of the transformers package, in their default configuration, give what they give whole."""

import pytest
from launch.case_jobs import of_job, results
from soak import paired

WORLDS = (2, 3)
COLLECTED = ("the attentions of remote layers are refused", "the router logits of remote layers are refused")
NAMES = ("gpt2", "bert", "t5", "llama", "vit", "bart")


def found(world: int) -> dict[str, list[str]]:
    return results(f"real{world}", world, "equivalence/run_real_models.py")


@pytest.mark.parametrize(("world", "name"), [of_job(f"real{w}", name, w, name) for name, w in paired(NAMES, WORLDS)])
def test_a_real_model_cut_is_the_model_whole(world, name):
    assert name in found(world), f"it did not run: {found(world)['launch']}"
    assert not found(world)[name], "\n".join(found(world)[name][:20])


@pytest.mark.parametrize(("world", "name"), [of_job(f"real{w}", name, w, name) for w in WORLDS for name in COLLECTED])
def test_what_cannot_be_collected_is_refused(world, name):
    assert name in found(world), f"it did not run: {found(world)['launch']}"
    assert not found(world)[name], "\n".join(found(world)[name][:20])


@pytest.mark.parametrize("world", [of_job(f"real{world}", "", world) for world in WORLDS])
def test_the_launch_ends_well_and_leaves_nothing_behind(world):
    assert found(world)["launch"] == []
