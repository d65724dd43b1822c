# SPDX-License-Identifier: Apache-2.0
"""Recordings of two ranks that are one pipeline."""

import contextlib
import io
import json
import pathlib
import tempfile

import pytest
import torch
from multiprocess.steps import train_step
from torch import nn

import lamina

MICROBATCHES = 4
BATCH = torch.ones(8, 4)


def start():
    lamina.init(partitions=2, microbatches=MICROBATCHES, auto_partition=False, default_partition=0, timeout_s=60)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    lamina.set_partition(layers[1], 1)
    return train_step(lamina.distribute(layers))


@contextlib.contextmanager
def folder():
    """One for all ranks, until all have left."""
    with tempfile.TemporaryDirectory() as mine:
        yield pathlib.Path(lamina.allgather(mine, lamina.WORLD)[0])
        lamina.barrier()


def rows_of(path):
    return json.loads(path.read_text())["traceEvents"]


def steps_of(rows):
    return {(row["pid"], row["args"]["step"]) for row in rows if row.get("cat") == "step"}


def case_a_timeline_holds_the_steps_within_it_of_all_ranks():
    step = start()
    step(BATCH)
    printed = io.StringIO()
    with folder() as where:
        with contextlib.redirect_stdout(printed), lamina.timeline(where / "timeline.json"):
            step(BATCH)
            step(BATCH)
        step(BATCH)
        lamina.barrier()
        rows = rows_of(where / "timeline.json")
    assert steps_of(rows) == {(0, 1), (0, 2), (1, 1), (1, 2)}
    turns = {(row["pid"], row["name"], row["cat"]) for row in rows if row.get("cat") in ("forward", "backward")}
    named = [(0, "step body"), (0, "0"), (1, "1")]
    assert turns == {(rank, name, what) for rank, name in named for what in ("forward", "backward")}
    assert {row["pid"] for row in rows if row["ph"] in "sf"} == {0, 1}
    assert ("bubble" in printed.getvalue()) == (lamina.rank() == 0)


def case_an_error_leaves_no_file_and_the_next_timeline_works():
    step = start()
    with folder() as where:
        with pytest.raises(ZeroDivisionError), lamina.timeline(where / "none.json"):
            step(BATCH)
            raise ZeroDivisionError
        assert not (where / "none.json").exists()
        with lamina.timeline(where / "timeline.json"):
            step(BATCH)
        lamina.barrier()
        assert steps_of(rows_of(where / "timeline.json")) == {(0, 1), (1, 1)}


def case_a_timeline_that_cannot_be_written_is_told_before_it_begins_by_all_and_a_missing_folder_is_made():
    step = start()
    with folder() as where:
        (where / "file").write_text("")
        lamina.barrier()
        for place in (where / "file" / "timeline.json", where):
            with pytest.raises(lamina.FileError, match="cannot write") as caught, lamina.timeline(place):
                raise AssertionError("it began")
            assert caught.value.errno
        with lamina.timeline(where / "new" / "folder" / "timeline.json"):
            assert not list((where / "new" / "folder").iterdir())
            step(BATCH)
        lamina.barrier()
        assert steps_of(rows_of(where / "new" / "folder" / "timeline.json")) == {(0, 0), (1, 0)}


def case_a_timeline_inside_another_is_refused():
    start()
    with folder() as where, lamina.timeline(where / "timeline.json"):
        with pytest.raises(lamina.UsageError, match="inside a timeline"), lamina.timeline(where / "inner.json"):
            pass
        assert not (where / "inner.json").exists()


def case_metrics_of_each_rank_and_a_summary_on_the_first():
    step = start()
    step(BATCH)
    with folder() as where:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), lamina.Metrics(where) as metrics:
            for _ in range(3):
                step(BATCH)
                metrics.step(samples=len(BATCH))
        lamina.barrier()
        lines = [json.loads(line) for line in (where / f"rank-{lamina.rank()}.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert 0 < line["bubble"] < 1 and line["step_s"] <= line["time_s"]
        # An activation, or its gradient, for each microbatch.
        assert line["messages"] >= MICROBATCHES and line["sent_bytes"] >= BATCH.nbytes
    summary = printed.getvalue().splitlines()
    assert len(summary) == (4 if lamina.rank() == 0 else 0)
    assert not summary or summary[0].startswith("metrics of 2 steps")
