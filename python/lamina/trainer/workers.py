# SPDX-License-Identifier: Apache-2.0
"""Workers of loaders, where SIGTERM has a training end with its batch. It may come to all processes of a rank, and a
worker that it ends would be an error before that."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

_SIGTERM = {signal.SIGTERM}


@contextlib.contextmanager
def outliving_sigterm(loader: Any) -> Iterator[None]:
    """Workers that the loader starts inside are ended by a SIGTERM of their parent's alone."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        yield
        return
    begin, loader.worker_init_fn = loader.worker_init_fn, _Begin(loader.worker_init_fn)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)  # which they inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        loader.worker_init_fn = begin


class _Begin:
    """Begins a worker; it travels to those that are no copies of their parent."""

    def __init__(self, then: Callable[[int], None] | None):
        self._then = then

    def __call__(self, number: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)  # where a server of forks began it
        threading.Thread(target=_await_parent, daemon=True).start()
        if self._then is not None:
            self._then(number)


def _await_parent() -> None:
    while signal.sigwaitinfo(_SIGTERM).si_pid != multiprocessing.parent_process().pid:
        pass
    os._exit(0)
