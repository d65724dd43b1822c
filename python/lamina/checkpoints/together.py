# SPDX-License-Identifier: Apache-2.0
"""Work of all ranks together: it succeeds on all of them, or fails on all with the same words."""

from collections.abc import Callable
from typing import Any

from lamina import _lamina
from lamina.job import current


def everywhere(job: current.Job, do: Callable[[], Any], gathered: bool = False) -> Any:
    """Returns what `do` does, once it has succeeded on all ranks, or of all of them; else the first rank's error on
    every rank. Collective over the world."""
    result = _lamina.together(job.session, do)
    return job.session.all_gather("world", result) if gathered else result
