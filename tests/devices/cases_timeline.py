# SPDX-License-Identifier: Apache-2.0
"""Timelines and metrics of a rank whose device runs behind the host."""

import json
import os
import time
from pathlib import Path

import emulated
import torch
from torch import nn

import lamina

MIB = 1 << 20


def begin():
    lamina.init(microbatches=2, device="gpu")
    model = lamina.DistributedModel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]))

    @lamina.step
    def step(x):
        model.backward(model(x).sum())

    return step, torch.ones(4, 8, device=lamina.device())


def recorded(name, run):
    """The slices that `run()` leaves in a timeline, by their row, in seconds."""
    path = Path(os.environ["DIR"]) / name
    with lamina.timeline(path):
        run()
    events = json.loads(path.read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = {}
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        slices.setdefault(rows[event["tid"]], []).append((event["ts"] / 1e6, event["dur"] / 1e6))
    return slices


def case_turns_are_as_the_device_ran_them_and_nobody_waits_for_them():
    step, x = begin()
    step(x)
    torch.accelerator.synchronize()
    hosts = []

    def run():
        emulated.reset_counts()
        for _ in range(3):
            began = time.perf_counter()
            step(x)
            hosts.append(time.perf_counter() - began)
        assert emulated.counts()["waits"] == 0

    began = time.perf_counter()
    slices = recorded("turns.json", run)
    lasted = time.perf_counter() - began
    steps, turns = slices["steps"], slices["compute"]
    assert (len(steps), len(turns)) == (3, 6)
    assert sum(hosts) < lasted / 2  # the device has more than that to do
    in_turns = sum(duration for _, duration in turns)
    assert 2 * sum(hosts) < in_turns <= lasted, (hosts, in_turns, lasted)
    for number, (start, duration) in enumerate(steps):
        inside = turns[2 * number : 2 * number + 2]
        assert start <= inside[0][0] and inside[1][0] + inside[1][1] <= start + duration
        assert inside[0][0] + inside[0][1] <= inside[1][0]


def case_metrics_have_the_memory_of_the_device():
    step, x = begin()
    with lamina.Metrics(Path(os.environ["DIR"]) / "metrics") as metrics:
        step(x)
        small = metrics.step()["memory_bytes"]
        held = torch.ones(5 * MIB // 4, device=lamina.device())
        step(x)
        torch.accelerator.synchronize()
        line = metrics.step()
    assert 0 < small < MIB
    assert 5 * MIB < line["memory_bytes"] < 6 * MIB, line
    assert line["step_s"] > 0
    del held
