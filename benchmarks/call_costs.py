# SPDX-License-Identifier: Apache-2.0
"""The costs of a remote call, besides the time until it is over: context switches, processor time and Python functions,
at the rank that makes it and at the one that serves it."""

import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

UNITS = {"context switches": "switches", "processor time": "us", "Python functions": "functions"}
BLOCKS = 5
TRIES = 10


class Functions:
    """Counts the Python functions that a thread enters, as its profiler; a generator once more each time it goes on.

    Attributes:
        entered: how many.
        begun: how many of them the engine has called, not Python.
    """

    def __init__(self):
        self.entered, self.begun = 0, 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self.entered += 1
            self.begun += frame.f_back is None


def used(counts: bool) -> list[float]:
    """Counts of what this process has used so far: context switches, and microseconds of processor. Then the Python
    functions that this thread has entered since their count began, and how many of them the engine has called. With
    `counts` it begins now; else it ends."""
    counter = sys.getprofile()
    sys.setprofile(Functions() if counts else None)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    functions = [counter.entered, counter.begun] if isinstance(counter, Functions) else [0, 0]
    return [usage.ru_nvcsw + usage.ru_nivcsw, 1e6 * time.process_time(), *functions]


class Usage(nn.Module):
    """Returns what the process of its rank has used."""

    def forward(self, counts: bool) -> torch.Tensor:
        return torch.tensor(used(counts), dtype=torch.float64)


def costs_of(call: Callable[[], object], at_owner: Callable[[bool], torch.Tensor], count: int) -> dict[str, float]:
    """Measures what one call costs its caller and its owner, by name: medians of blocks of `count` calls.

    Args:
        call: makes it.
        at_owner: calls the owner's `Usage`.
    """

    def spent(calls: int) -> torch.Tensor:
        owner, caller = at_owner(False).clone(), torch.tensor(used(False), dtype=torch.float64)
        for _ in range(calls):
            call()
        return torch.stack([torch.tensor(used(False), dtype=torch.float64) - caller, at_owner(False) - owner])

    blocks = torch.stack([(spent(count) - spent(0)) / count for _ in range(BLOCKS)])
    return {
        f"{name} of {who}": statistics.median(blocks[:, row, column].tolist())
        for column, name in enumerate(("context switches", "processor time"))
        for row, who in enumerate(("the caller", "the owner"))
    }


def functions_of(call: Callable[[], object], at_owner: Callable[[bool], torch.Tensor], count: int) -> dict[str, float]:
    """Counts the Python functions that one call enters at its caller and its owner, by name; see `costs_of`. An owner
    serves calls in several threads, of which one is looked at, and has no figure where that one has served none."""
    found = {}
    for _ in range(TRIES):
        at_owner(True).clone()
        used(True)
        for _ in range(count):
            call()
        caller, _ = used(False)[2:]
        owner, begun = at_owner(False)[2:].tolist()
        found["Python functions of the caller"] = caller / count
        if begun > 1:  # one is the call of `Usage`
            return found | {"Python functions of the owner": owner / begun}
    return found
