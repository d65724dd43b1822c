# SPDX-License-Identifier: Apache-2.0
"""Ranks with parts that nobody else has, of which some are killed and started again, or leave in order. They join the
others, in another layout, with the losses and states of one process that nobody disturbed."""

import json
import os
import signal

import pytest
import torch
from fault.test_joining import ends, require_all_leave, said
from fault.test_joining import job as joining_job
from fault.test_joining_by_hand import jobs  # noqa: F401
from fault.test_machines import lose_machine
from fault.test_outliving import require_states
from soak import paired, some

SHARDS = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": None}
LAYOUTS = {
    "pp 3": (3, {"partitions": 3, "microbatches": 6}),
    "pp 2 x copies 2": (4, {"partitions": 2, "microbatches": 6}),
    "sdp 4": (4, {"sharded_data_parallel_degree": 4, "microbatches": 3, **SHARDS}),
    "pp 2 x sdp 2": (4, {"partitions": 2, "sharded_data_parallel_degree": 2, "microbatches": 6, **SHARDS}),
    "divided states": (3, {"shard_optimizer_state": True, "microbatches": 4}),
}
# How many partitions and copies each has.
SHAPES = {
    "pp 3": (3, 1),
    "pp 2 x copies 2": (2, 2),
    "sdp 4": (1, 4),
    "pp 2 x sdp 2": (2, 2),
    "divided states": (1, 3),
}


def job(launcher, layout, *deaths, options=None, **environment):
    ranks, keys = LAYOUTS[layout]
    environment |= {"KEYS": json.dumps(keys), "OPTIONS": json.dumps(options or {})}
    return joining_job(launcher, ranks, *deaths, **environment)


def require_undisturbed(found, layout, monkeypatch, ranks=None, optimizer="adamw"):
    """All have the numbers of one process, and the layout that was asked for, or there are fewer ranks."""
    import joining

    monkeypatch.setenv("OPTIMIZER", optimizer)
    losses, state, states = joining.outliving.plain(joining.STEPS, joining.made)
    for end in found.values():
        assert end["size"] == (ranks or LAYOUTS[layout][0])
        assert ranks is not None or end["layouts"][-1] == SHAPES[layout]
        first = end["sizes"][0][0] if end["is_new"] else 0
        torch.testing.assert_close(end["losses"][first:], losses[first:], rtol=1e-12, atol=1e-12)
        require_states(end, state, states)
        assert end["drawn"] == joining.STEPS


PLACES = [("forward", 0), ("before", 1), ("after", 2), ("before", 0)]


@pytest.mark.parametrize(("layout", "at"), paired(LAYOUTS, PLACES, seed=1))
def test_one_that_is_killed_comes_back_in_the_layout_that_was_asked_for(layout, at, launcher, monkeypatch):
    place, victim = at
    optimizer = ("adamw", "momentum", "rmsprop")[len(layout) % 3]
    lines = job(launcher, layout, f"{place}:{victim}:3", OPTIMIZER=optimizer)
    found = ends(launcher)
    assert found.keys() == set(range(LAYOUTS[layout][0])), lines
    assert found[victim]["is_new"]
    require_undisturbed(found, layout, monkeypatch, optimizer=optimizer)
    assert said(lines, f"lamina run: rank {victim} is started again in 0.5 s, to join them"), lines
    if victim == 0:
        return  # what the first rank says then goes to no terminal
    (joined,) = said(lines, "lamina: 1 rank has joined before step ")
    partitions, copies = SHAPES[layout]
    of = f"partitions {partitions} x " if partitions > 1 else ""
    assert f": {LAYOUTS[layout][0]} ranks, {of}copies {copies}; " in joined


@pytest.mark.parametrize(
    ("layout", "deaths"),
    paired(["pp 2 x copies 2", "sdp 4"], [("before:1:3", "after:3:6"), ("forward:0:2", "before:2:5")]),
)
def test_two_are_killed_and_both_come_back(layout, deaths, launcher, monkeypatch):
    lines = job(launcher, layout, *deaths)
    found = ends(launcher)
    assert found.keys() == set(range(4)), lines
    assert sum(end["is_new"] for end in found.values()) == 2
    require_undisturbed(found, layout, monkeypatch)


@pytest.mark.parametrize(
    ("layout", "what"),
    paired(["pp 3", "divided states"], ["dies placed", "dies entering", "dies asking", "dies working"]),
)
def test_a_newcomer_that_dies_disturbs_nobody(layout, what, launcher, monkeypatch):
    lines = job(launcher, layout, "before:1:3", NEWCOMER=what)
    found = ends(launcher)
    assert (launcher.folder / "faltered.1").exists(), lines
    assert {0, 2} <= found.keys(), lines
    require_undisturbed(found, layout, monkeypatch, ranks=len(found))


def test_the_first_rank_dies_while_another_one_comes_back(launcher, monkeypatch):
    lines = job(launcher, "pp 2 x copies 2", "before:1:3", "before:0:5")
    found = ends(launcher)
    assert found.keys() == set(range(4)), lines
    require_undisturbed(found, "pp 2 x copies 2", monkeypatch)


@pytest.mark.parametrize("options", [{"keep_every": 4}, {"layouts": [{"partitions": 1}, {"partitions": 3}]}])
def test_versions_and_layouts_are_those_that_were_given(options, launcher, monkeypatch):
    lines = job(launcher, "pp 3", "after:1:5", options=options)
    found = ends(launcher)
    assert found.keys() == {0, 1, 2}, lines
    assert len({end["layouts"][-1] for end in found.values()}) == 1
    require_undisturbed(found, "pp 3", monkeypatch, ranks=3)
    if "layouts" in options:
        assert found[0]["layouts"][1:] == [(1, 2), (1, 3)]


DIFFERS = {
    "model": "its model is another one",
    "optimizer": "its optimizer is another one: SGD; the job has AdamW",
    "config": "its configuration is another one: seed 6; the job has seed 5",
    "layouts": "its way to go on is another one: ",
}


@pytest.mark.parametrize("what", some(DIFFERS, 2))
def test_a_newcomer_that_differs_is_refused_by_name(what, launcher, monkeypatch):
    lines = job(launcher, "pp 3", "before:1:3", NEWCOMER=what)
    found = ends(launcher)
    assert found.keys() == {0, 2}, lines
    require_undisturbed(found, "pp 3", monkeypatch, ranks=2)
    (line,) = said(lines, "lamina.errors.ConfigError: the job does not let this newcomer in: ")
    assert DIFFERS[what] in line and "[elastic-newcomer]" in line, line


@pytest.mark.parametrize("layout", some(LAYOUTS, 1, seed=2))
def test_random_numbers_go_on(layout, launcher):
    job(launcher, layout, DROPOUT="0.3")
    undisturbed = ends(launcher)[0]
    lines = job(launcher, layout, "before:1:3", DROPOUT="0.3")
    found = ends(launcher)
    assert found[1]["is_new"], lines
    for end in found.values():
        first = end["sizes"][0][0] if end["is_new"] else 0
        torch.testing.assert_close(end["losses"][first:], undisturbed["losses"][first:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("layout", "victim"), paired(["pp 3", "sdp 4", "pp 2 x copies 2"], [0, 1]))
def test_one_that_is_told_to_end_leaves_in_order_and_comes_back(layout, victim, launcher, monkeypatch):
    lines = job(launcher, layout, f"leaves:{victim}:3")
    found, ranks = ends(launcher), LAYOUTS[layout][0]
    assert found.keys() == set(range(ranks)), lines
    assert found[victim]["is_new"]
    require_undisturbed(found, layout, monkeypatch)
    assert [updates for updates, *_ in found[2]["sizes"]][:2] == [0, 3], "nothing is done again"
    assert f"lamina run: rank {victim} has left in order; {ranks - 1} others go on" in lines
    assert not said(lines, "lost rank"), lines


def test_ranks_that_leave_at_once_take_nothing_with_them(launcher, monkeypatch):
    lines = job(launcher, "sdp 4", "leaves:1:3", "leaves:2:3", options={"keep_every": 3})
    found = ends(launcher)
    assert found.keys() == set(range(4)), lines
    require_undisturbed(found, "sdp 4", monkeypatch)
    assert sum("has left in order" in line for line in lines) == 2, lines
    assert not said(lines, "lost rank"), lines


def test_a_job_that_is_told_to_end_leaves_in_order(launcher):
    _, keys = LAYOUTS["pp 3"]
    require_all_leave(launcher, KEYS=json.dumps(keys))


# How many others each may have.
JOINERS = {"pp 3": 1, "pp 2 x copies 2": 2, "sdp 4": 2, "pp 2 x sdp 2": 2, "divided states": 1}


def by_hand(jobs, layout, **more):  # noqa: F811
    """A job that trains, how many ranks it has with others by hand, and what these are to be given."""
    ranks, keys = LAYOUTS[layout]
    full = ranks + JOINERS[layout]
    env = {"KEYS": json.dumps(keys), "FULL": full} | more
    job = jobs.begin(ranks, f"1:{full}", **env)
    jobs.trains("0")
    return job, full, env


def names_of(layout):
    return [*map(str, range(LAYOUTS[layout][0])), *(f"a{number}" for number in range(JOINERS[layout]))]


@pytest.mark.parametrize("layout", some(LAYOUTS, 2, seed=4))
def test_others_join_by_hand(layout, jobs, monkeypatch):  # noqa: F811
    job, full, env = by_hand(jobs, layout)
    other = jobs.join(JOINERS[layout], "a", **env)
    jobs.end(job, other)
    found = jobs.found(*names_of(layout))
    require_undisturbed(found, layout, monkeypatch, ranks=full)
    assert found["a0"]["is_new"] and [size for _, size, _ in found["0"]["sizes"]] == [LAYOUTS[layout][0], full]


@pytest.mark.parametrize("layout", some(LAYOUTS, 1, seed=5))
def test_one_that_has_joined_by_hand_is_killed_and_comes_back(layout, jobs, monkeypatch):  # noqa: F811
    job, full, env = by_hand(jobs, layout)
    other = jobs.join(JOINERS[layout], "a", **env, NEWCOMER="dies working")
    jobs.end(job, other)
    assert (jobs.launcher.folder / "faltered.a0").exists(), jobs.all_lines()
    found = jobs.found(*names_of(layout))
    require_undisturbed(found, layout, monkeypatch, ranks=full)
    assert found["a0"]["sizes"][0][0] > 0


@pytest.mark.parametrize("layout", some(["pp 3", "divided states"], 1, seed=6))
def test_a_machine_that_has_joined_by_hand_is_lost_with_its_parts(layout, jobs, monkeypatch):  # noqa: F811
    ranks, keys = LAYOUTS[layout]
    env = {"KEYS": json.dumps(keys), "FULL": ranks + 2, "SLOW_S": 0.6}
    job = jobs.begin(ranks, f"1:{ranks + 1}", **env)
    jobs.trains("0")
    other = jobs.join(1, "a", **env)
    jobs.trains("a0")
    lose_machine(other)
    jobs.end(job)
    found = jobs.found(*map(str, range(ranks)))
    require_undisturbed(found, layout, monkeypatch, ranks=ranks)
    assert [size for _, size, _ in found["0"]["sizes"]] == [ranks, ranks + 1, ranks]


def test_a_spare_takes_the_parts_of_a_lost_rank(jobs, monkeypatch):  # noqa: F811
    _, keys = LAYOUTS["pp 3"]
    env = {"KEYS": json.dumps(keys), "FULL": 4, "SLOW_S": 0.8}
    job = jobs.begin(3, "1:3", **env)
    victim = jobs.trains("1")
    other = jobs.join(1, "a", **env)
    jobs.wait_for("this newcomer waits, for 3600 s at most (--spare-wait)", "a")
    os.kill(victim, signal.SIGKILL)
    jobs.end(job, other)
    found = jobs.found("0", "2", "a0")
    require_undisturbed(found, "pp 3", monkeypatch, ranks=3)
    assert [size for _, size, _ in found["0"]["sizes"]] == [3, 3], "in one change"
