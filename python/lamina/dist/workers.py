# SPDX-License-Identifier: Apache-2.0
"""Workers of loaders, and their ends. torch ends them by SIGTERM where a training has failed, and leaves the folder of
sockets by which their tensors travel. Where SIGTERM has a training end with its batch, it may come to all processes of
a rank, and a worker that it ends would be an error before that."""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

_SIGTERM = {signal.SIGTERM}


@contextlib.contextmanager
def ending_workers(loader: Any, by_parent: bool) -> Iterator[None]:
    """Workers that the loader starts inside leave nothing behind when a SIGTERM ends them; with `by_parent` one of
    their parent's alone does."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        yield
        return
    begin, loader.worker_init_fn = loader.worker_init_fn, _Begin(loader.worker_init_fn, by_parent)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)  # which they inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        loader.worker_init_fn = begin


class _Begin:
    """Begins a worker; it travels to those that are no copies of their parent."""

    def __init__(self, then: Callable[[int], None] | None, by_parent: bool):
        self._then, self._by_parent = then, by_parent

    def __call__(self, number: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)  # where a server of forks began it
        threading.Thread(target=_await_end, args=(self._by_parent,), daemon=True).start()
        if self._then is not None:
            self._then(number)


def _await_end(by_parent: bool) -> None:
    while signal.sigwaitinfo(_SIGTERM).si_pid != multiprocessing.parent_process().pid and by_parent:
        pass
    multiprocessing.util._run_finalizers()  # as its own end would
    os._exit(0)
