# SPDX-License-Identifier: Apache-2.0
"""Waiting for local rank 0 by a file: for work that takes longer than a collective may wait."""

import contextlib
import itertools
import os
import random
import string
import time
from collections.abc import Iterator

import torch.distributed as dist

from lamina.dist import ranks
from lamina.dist.collectives import alone, broadcast_object_list, typed
from lamina.dist.local_zero import share_failures, tell
from lamina.errors import PeerError
from lamina.util.files import own

_LOOK_AGAIN_S = 0.1
_waits = itertools.count()


def get_node_signal_file_name(rng: random.Random | None = None) -> str:
    """A name for a file of this machine: random, and the same on all of its ranks. Collective."""
    letters = (rng or random.SystemRandom()).choices(string.ascii_lowercase + string.digits, k=6)
    names = ["".join(letters)]
    broadcast_object_list(names)
    return f"._signal_file_node{ranks.get_node_rank()}_{names[0]}"


def write_signal_file(signal_file_name: str, dir_path: str | None = None) -> str:
    """The path of that file, in the folder or the current one; local rank 0 writes it, and makes the folder."""
    folder = os.getcwd() if dir_path is None else dir_path
    path = os.path.join(folder, signal_file_name)
    if ranks.get_local_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="utf-8", opener=own) as file:
            file.write("local rank 0 is done")
    return path


@contextlib.contextmanager
def local_rank_zero_download_and_wait(expected_file_path: str) -> Iterator[None]:
    """Runs the body on local rank 0, and on the others once the file is there, however long that takes.

    Errors:
        PeerError: local rank 0 raised in the body, or its job's store is gone.
    """
    failure = f"lamina/dist/wait/{ranks.get_node_rank()}/{next(_waits)}"
    if ranks.get_local_rank() == 0:
        with _put_down(failure):
            yield
    else:
        _wait_for(expected_file_path, failure)
        yield


@contextlib.contextmanager
def busy_wait_for_local_rank_zero(dir_path: str | None = None) -> Iterator[None]:
    """Runs the body on all ranks; those that end it wait until local rank 0 of their machine has, however long
    that takes. Machines wait for each other at most the timeout of `initialize_dist`.

    Args:
        dir_path: a folder that the ranks of a machine share, for a file that is gone afterwards.

    Errors:
        RemoteError: another rank raised in the body; that rank gets its own exception.
    """
    if alone("busy_wait_for_local_rank_zero()"):
        yield
        return
    name = get_node_signal_file_name()
    try:
        yield
    except BaseException as error:
        with _signalled(name, dir_path):
            tell(error)
        raise
    with _signalled(name, dir_path):
        share_failures(None)


@contextlib.contextmanager
def _signalled(name: str, dir_path: str | None) -> Iterator[None]:
    path = write_signal_file(name, dir_path)
    if ranks.get_local_rank() != 0:
        _wait_for(path)
    try:
        yield  # every rank has seen the file when its collective ends
    finally:
        if ranks.get_local_rank() == 0:
            os.remove(path)


@contextlib.contextmanager
def _put_down(failure: str) -> Iterator[None]:
    """Ranks that wait for the file have to learn that it will not come: the job's store tells, under the key
    `failure`."""
    try:
        yield
    except BaseException as error:
        if ranks.is_initialized():
            with contextlib.suppress(Exception):
                _store().set(failure, f"{type(error).__name__}: {error}")
        raise


def _wait_for(path: str, failure: str = "") -> None:
    while not os.path.exists(path):
        if failure and ranks.is_initialized():
            with typed(f"waiting for {path}"):
                if _store().check([failure]):
                    why = _store().get(failure).decode()
                    raise PeerError(f"local rank 0 of machine {ranks.get_node_rank()} failed before {path}: {why}")
        time.sleep(_LOOK_AGAIN_S)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
