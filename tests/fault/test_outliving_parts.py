# SPDX-License-Identifier: Apache-2.0
"""Ranks with parts that nobody else has, of which some are killed: the others go on from what was kept, in another
layout, with the losses and states of one process that nobody killed."""

import json
import sys
from pathlib import Path

import pytest
import torch
from fault.test_outliving import require_states
from launch.launcher_harness import PRELOAD
from soak import paired, some

PROGRAM = Path(__file__).with_name("outliving_parts.py")
sys.path.insert(0, str(PROGRAM.parent))

SHARDS = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": None}
LAYOUTS = {
    "pp 4": {"partitions": 4, "microbatches": 12},
    "pp 2 x copies 2": {"partitions": 2, "microbatches": 6},
    "sdp 4": {"sharded_data_parallel_degree": 4, "microbatches": 3, **SHARDS},
    "sdp 2 x copies 2": {"sharded_data_parallel_degree": 2, "microbatches": 3, **SHARDS},
    "pp 2 x sdp 2": {"partitions": 2, "sharded_data_parallel_degree": 2, "microbatches": 6, **SHARDS},
    "tp 2 x copies 2": {"tensor_parallel_degree": 2, "prescaled_batch": True, "microbatches": 6},
    "tp 2, own batches": {"tensor_parallel_degree": 2, "microbatches": 3},
    "pp 2 x tp 2": {"partitions": 2, "tensor_parallel_degree": 2, "prescaled_batch": True, "microbatches": 12},
    "divided states": {"shard_optimizer_state": True, "microbatches": 3},
}
PLACES = ("forward", "backward", "before", "update", "after", "keeping", "kept")
COPIES = {"microbatches": 3, "sdp_gradient_clipping": None}
ANOTHER = {  # layouts, and the ones to which they change
    "copies to partitions": (COPIES, {"partitions": 4}),
    "copies to partitions at once": (COPIES | {"skip_tracing": True}, {"partitions": 4}),
    "copies to shards": (COPIES, {"sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 0}),
    "copies to divided states": (COPIES, {"shard_optimizer_state": True}),
    "copies to slices": (COPIES, {"tensor_parallel_degree": 2}),
    "partitions to copies": (LAYOUTS["pp 4"], {"partitions": 1}),
    "partitions to both": (LAYOUTS["pp 4"], {"partitions": 2}),
    "shards to partitions": (LAYOUTS["sdp 4"], {"sharded_data_parallel_degree": 1, "partitions": 2}),
    "divided states to copies": (LAYOUTS["divided states"], {"shard_optimizer_state": False}),
    "slices to copies": (LAYOUTS["tp 2, own batches"], {"tensor_parallel_degree": 1}),
}
AMID = ("asked", "listing", "held", "opened", "let go", "ended", "cutting", "trimming", "loading", "settling", "first")
CHANGES = ("meeting", "holding", "ending", "cutting", "loading", "keeping")


def ends(launcher, ranks, keys, place, *deaths, **environment):
    """Returns what those who are left have written, by rank."""
    started = launcher.start_ranks(ranks, PROGRAM, json.dumps(keys), place, *deaths, env=environment)
    outputs = [rank.communicate(timeout=90)[1] for rank in started]
    dead = {int(each.partition(":")[0]) for each in deaths}
    assert [rank.returncode for rank in started] == [-9 if number in dead else 0 for number in range(ranks)], outputs
    return {rank: torch.load(launcher.folder / f"end.{rank}") for rank in set(range(ranks)) - dead}


def require_undisturbed(found, monkeypatch, optimizer="adamw"):
    import outliving_parts

    monkeypatch.setenv("OPTIMIZER", optimizer)
    losses, state, states = outliving_parts.plain()
    for end in found.values():
        assert end["size"] == len(found)
        torch.testing.assert_close(end["losses"], losses, rtol=1e-12, atol=1e-12)
        require_states(end, state, states)


@pytest.mark.parametrize(("layout", "place"), paired(LAYOUTS, PLACES, seed=1))
def test_the_others_go_on_wherever_one_is_killed(layout, place, launcher, monkeypatch):
    victim = (len(layout) + len(place)) % 4
    optimizer = "momentum" if victim % 2 else "adamw"
    found = ends(launcher, 4, LAYOUTS[layout], place, str(victim), OPTIMIZER=optimizer)
    require_undisturbed(found, monkeypatch, optimizer)


@pytest.mark.parametrize(("layout", "place"), paired(["pp 4", "sdp 4", "divided states"], CHANGES, seed=2))
def test_a_further_one_may_be_killed_while_they_change(layout, place, launcher, monkeypatch):
    # Rank 2 keeps what rank 1 has, rank 0 what rank 3 has.
    found = ends(launcher, 4, LAYOUTS[layout], "before", "1", "3:change", CHANGE=place)
    require_undisturbed(found, monkeypatch)


@pytest.mark.parametrize("layout", some(LAYOUTS, 3, seed=3))
def test_ranks_are_lost_one_after_the_other(layout, launcher, monkeypatch):
    found = ends(launcher, 4, LAYOUTS[layout], "backward", "0:2", "3:5")
    require_undisturbed(found, monkeypatch)


def test_a_rank_may_be_lost_after_its_last_update(launcher, monkeypatch):
    require_undisturbed(ends(launcher, 4, LAYOUTS["pp 4"], "after", "1:7"), monkeypatch)


def test_larger_jobs_lose_ranks_one_after_the_other(launcher, monkeypatch):
    found = ends(launcher, 6, {"partitions": 3, "microbatches": 6}, "keeping", "0:2", "5:6")
    require_undisturbed(found, monkeypatch)


def test_a_single_rank_may_be_left(launcher, monkeypatch):
    found = ends(launcher, 2, {"partitions": 2, "microbatches": 12}, "before", "1")
    require_undisturbed(found, monkeypatch)


WHOLE = [layout for layout in LAYOUTS if "tp 2" not in layout]  # layers are sliced when the model is wrapped


@pytest.mark.parametrize(("layout", "victim"), paired(WHOLE, range(4), seed=9))
def test_a_rank_may_be_lost_before_the_first_step(layout, victim, launcher, monkeypatch):
    require_undisturbed(ends(launcher, 4, LAYOUTS[layout], "start", f"{victim}:0"), monkeypatch)


def test_ranks_are_lost_before_the_first_step_and_after_it(launcher, monkeypatch):
    require_undisturbed(ends(launcher, 5, {"partitions": 5, "microbatches": 12}, "start", "0:0", "3:2"), monkeypatch)


def test_values_that_the_first_rank_alone_had_are_lost_with_it(launcher, monkeypatch):
    require_undisturbed(ends(launcher, 4, LAYOUTS["pp 4"], "start", "2:0", FIRST="1"), monkeypatch)
    for said in ended(launcher, LAYOUTS["pp 4"], "start", "0:0", FIRST="1"):
        assert "the first rank is lost before the first step" in said and "[elastic-lost]" in said


def test_versions_may_lie_several_updates_apart(launcher, monkeypatch):
    found = ends(launcher, 4, LAYOUTS["pp 4"], "forward", "2:6", OPTIONS=json.dumps({"keep_every": 3}))
    require_undisturbed(found, monkeypatch)


def test_nothing_is_sent_where_another_rank_has_the_same(launcher, monkeypatch):
    found = ends(launcher, 4, LAYOUTS["pp 2 x copies 2"], "none")
    require_undisturbed(found, monkeypatch)
    assert [end["sent"] for end in found.values()] == [0, 0, 0, 0]


def test_the_first_layout_that_fits_is_taken(launcher, monkeypatch):
    layouts = [{"partitions": 4}, {"partitions": 1, "sharded_data_parallel_degree": 3}, {"partitions": 3}]
    found = ends(launcher, 4, LAYOUTS["pp 4"], "after", "3", OPTIONS=json.dumps({"layouts": layouts}))
    require_undisturbed(found, monkeypatch)
    assert {(end["partitions"], end["copies"]) for end in found.values()} == {(1, 3)}


def test_the_nearest_number_of_parts_is_taken(launcher, monkeypatch):
    found = ends(launcher, 4, LAYOUTS["pp 2 x sdp 2"], "after", "3")
    require_undisturbed(found, monkeypatch)
    assert {(end["partitions"], end["copies"]) for end in found.values()} == {(3, 1)}


@pytest.mark.parametrize("into", [{"partitions": 2}, {"partitions": 1, "sharded_data_parallel_degree": 2}])
def test_a_layout_to_which_the_script_has_changed_is_kept_too(into, launcher, monkeypatch):
    found = ends(launcher, 4, LAYOUTS["pp 4"] | SHARDS, "before", "1:5", INTO=json.dumps(into))
    require_undisturbed(found, monkeypatch)
    assert all(end["updates"][-1] >= 4 for end in found.values())


@pytest.mark.parametrize(("another", "place"), paired(ANOTHER, AMID, seed=6))
def test_a_rank_may_be_killed_amid_a_change_of_the_layout(another, place, launcher, monkeypatch):
    keys, into = ANOTHER[another]
    victim = (len(another) + len(place)) % 4
    found = ends(launcher, 4, keys, "none", f"{victim}:amid", INTO=json.dumps(into), CHANGE=place)
    require_undisturbed(found, monkeypatch)
    is_kept = place not in AMID[:3] or another.startswith("copies")  # as they are when the change begins
    assert all(end["updates"] == [0, 2 if is_kept else 1] for end in found.values())


@pytest.mark.parametrize("another", some(ANOTHER, 2, seed=7))
@pytest.mark.parametrize("seed", some(range(20), 1, seed=8))
def test_a_rank_may_be_killed_at_any_time_of_a_change(another, seed, launcher, monkeypatch):
    keys, into = ANOTHER[another]
    found = ends(launcher, 4, keys, "none", f"{seed % 4}:amid", INTO=json.dumps(into), CHANGE="300")
    require_undisturbed(found, monkeypatch)


@pytest.mark.parametrize("another", ["copies to shards", "partitions to copies"])
def test_ranks_are_lost_amid_a_change_and_after_it(another, launcher, monkeypatch):
    keys, into = ANOTHER[another]
    found = ends(launcher, 4, keys, "before", "1:amid", "2:4", INTO=json.dumps(into), CHANGE="cutting")
    require_undisturbed(found, monkeypatch)


@pytest.mark.parametrize("another", ["copies to divided states", "copies to partitions"])
def test_copies_that_got_parts_outlive_ranks(another, launcher, monkeypatch):
    keys, into = ANOTHER[another]
    found = ends(launcher, 4, keys, "forward", "1:2", "0:5", INTO=json.dumps(into))
    require_undisturbed(found, monkeypatch)


@pytest.mark.parametrize("layout", some(LAYOUTS, 2, seed=5))
def test_random_numbers_go_on(layout, launcher):
    undisturbed = ends(launcher, 4, LAYOUTS[layout], "none", DROPOUT="0.3")[0]
    found = ends(launcher, 4, LAYOUTS[layout], "update", "1", DROPOUT="0.3")
    for end in found.values():
        torch.testing.assert_close(end["losses"], undisturbed["losses"], rtol=1e-12, atol=1e-12)


def test_masters_go_on(launcher):
    half = {"bf16": True, "buffer_dtype": "own"}
    for layout in ("pp 2 x copies 2", "sdp 4"):
        keys = LAYOUTS[layout] | half
        environment = {"DTYPE": "float32", "DROPOUT": "0.3"}
        undisturbed = ends(launcher, 4, keys, "none", **environment)[0]
        found = ends(launcher, 4, keys, "update", "1", **environment)
        for end in found.values():
            torch.testing.assert_close(end["losses"], undisturbed["losses"], rtol=2e-2, atol=2e-2)
            for name, value in undisturbed["model"].items():
                torch.testing.assert_close(end["model"][name], value, rtol=5e-2, atol=2e-2)


def ended(launcher, keys, place, *deaths, **environment):
    """Returns the words of those who are left, where nobody goes on."""
    started = launcher.start_ranks(4, PROGRAM, json.dumps(keys), place, *deaths, env=environment)
    said = [rank.communicate(timeout=90)[1] for rank in started]
    dead = {int(each.partition(":")[0]) for each in deaths}
    assert [rank.returncode for rank in started] == [-9 if number in dead else 1 for number in range(4)], said
    return [text for number, text in enumerate(said) if number not in dead]


def test_a_rank_that_is_lost_with_its_keeper_ends_the_job(launcher):
    for said in ended(launcher, LAYOUTS["pp 4"], "before", "2", "3"):
        assert "what rank 2 of 4 had is lost with whoever kept it" in said
        assert "from its newest checkpoint" in said and "[elastic-lost]" in said


def test_a_loss_before_anything_was_kept_ends_the_job(launcher):
    for said in ended(launcher, LAYOUTS["pp 4"], "forward", "2:0"):
        assert "no version that all of them have was kept yet" in said and "[elastic-lost]" in said


@pytest.mark.parametrize(
    ("keys", "options", "says"),
    [
        ("pp 4", {"layouts": [{"partitions": 4}, {"partition": 3}]}, '"partition" is no key of a layout'),
        ("pp 4", {"layouts": [{"partitions": 7}]}, "partitions"),
        ("pp 4", {"layouts": [3]}, "no JSON object of keys"),
        ("pp 4", {"keep_every": 0}, "keep_every"),
        ("copies", {"layouts": [{"partitions": 2}]}, "copies of a model go on as fewer copies"),
    ],
)
def test_what_cannot_be_is_said_at_once(keys, options, says, launcher):
    for said in ended(launcher, (LAYOUTS | {"copies": {"microbatches": 3}})[keys], "none", OPTIONS=json.dumps(options)):
        assert says in said


def test_the_launcher_lets_the_others_go_on_in_another_layout(launcher, monkeypatch):
    keys = json.dumps(LAYOUTS["pp 2 x copies 2"])
    run = launcher.run(
        "run", *PRELOAD, "-n", 4, "--elastic", 2, PROGRAM, keys, "before", "1", env={"DIR": launcher.folder}
    )
    assert run.returncode == 0, run.stderr
    said = [line for line in run.stderr.splitlines() if line.startswith("lamina: lost rank")]
    assert len(said) == 1 and " in step 3: 3 ranks, partitions 3 x copies 1; step 3 again, " in said[0], said
    require_undisturbed({rank: torch.load(launcher.folder / f"end.{rank}") for rank in (0, 2, 3)}, monkeypatch)
