# SPDX-License-Identifier: Apache-2.0
"""Work of all ranks together: it succeeds on all of them, or fails on all with the same words."""

from collections.abc import Callable
from typing import Any

from lamina.errors import Error, FileError, FormatError, UsageError
from lamina.job import current


def met_on(rank: int, error: Exception) -> str:
    """Returns the words by which other ranks hear of an error: the rank that has met it, and its own words."""
    words = str(error)
    return words if words.startswith("on rank ") else f"on rank {rank}: {words}"


def everywhere(job: current.Job, do: Callable[[], Any], gathered: bool = False) -> Any:
    """Returns what `do` does, once it has succeeded on all ranks, or of all of them; else the first rank's error on
    every rank. Collective over the world."""
    error: Exception | None = None
    result, problem = None, None
    try:
        result = do()
    except Exception as raised:
        error = raised
        kind = type(raised).__name__ if isinstance(raised, Error) else ""
        problem = (kind, met_on(job.session.rank, raised))
    if first := job.session.first_given("world", problem):
        rank, (kind, words) = first
        if rank == job.session.rank:
            raise error
        raise {"FormatError": FormatError, "FileError": FileError}.get(kind, UsageError)(words)
    return job.session.all_gather("world", result) if gathered else result
