# SPDX-License-Identifier: Apache-2.0
"""Recordings of what the ranks of a job do, and when."""

import contextlib
import os
from collections.abc import Iterator

from lamina import _lamina
from lamina.job import current
from lamina.util.checks import require_local
from lamina.util.told import printable


@contextlib.contextmanager
def timeline(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records the steps within it, on all ranks, into one file that ui.perfetto.dev opens:

        with lamina.timeline("timeline.json"):
            for x, y in batches:
                train_step(x, y)

    Every rank of the job enters and leaves it. World rank 0 writes the file and prints a summary, which
    `lamina trace FILE` prints again. When an exception leaves it nothing is written. To record a job whole, also one
    that fails, start it by `lamina run --timeline FILE`. docs/timeline.md says how to read it.

    Args:
        path: the file, on world rank 0. What is missing of its folder is made.

    Errors:
        UsageError: inside a step function, another timeline, or a job that is recorded whole; an address of a store.
        FileError: the file cannot be written; on every rank, before anything is recorded.
    """
    job = current.outside_step("timeline()")
    require_local(path=path)
    session = job.session
    _lamina.start_timeline(session, os.fspath(path))
    try:
        job.routing.name_turns()
        yield
    except BaseException:
        _lamina.stop_timeline(session)
        raise
    finally:
        job.routing.name_turns(False)
    if summary := _lamina.write_timeline(session, os.fspath(path)):
        print(printable(summary), end="", flush=True)
