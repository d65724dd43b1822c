# SPDX-License-Identifier: Apache-2.0
"""The Python side of lists of cases that run through both faces."""

from collections.abc import Callable, Iterable

import lamina


def run(cases: Iterable[Callable[[], str | None]]) -> None:
    """Runs each case, a job of its own, on each rank. The first one prints a line for it, `case<TAB>text`: its error,
    or what it returns; "nothing" for None."""
    for case in cases:
        try:
            text = case() or "nothing"
        except lamina.errors.Error as error:
            text = str(error)
        if not lamina.is_initialized() or lamina.rank() == 0:
            print(f"{case.__name__}\t{text}", flush=True)
        lamina.shutdown()
