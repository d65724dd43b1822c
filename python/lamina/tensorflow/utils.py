# SPDX-License-Identifier: Apache-2.0
"""Files of checkpoints that go from one rank to another."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from lamina.errors import FormatError, UsageError
from lamina.job.messages import recv_from, send
from lamina.job.ranks import RankType
from lamina.tensorflow.checkpoints import folder_of_rank
from lamina.util.files import own

_CHUNK_BYTES = 16 << 20


def send_checkpoint_files(ckpt_dir: str, dest_rank: int) -> None:
    """Sends the files of this rank's folder below `ckpt_dir`, `mp_rank_N`, to a rank, which calls
    `receive_checkpoint_files`.

    Errors:
        UsageError: there is no such folder, or no such rank.
    """
    folder = Path(folder_of_rank(os.fspath(ckpt_dir)))
    if not folder.is_dir():
        raise UsageError(f"send_checkpoint_files(): there is no folder {folder}")
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = (PurePosixPath(folder.name) / file.relative_to(folder)).as_posix()
        for begins, chunk in _chunks(file):
            send((name, begins, chunk), dest_rank, RankType.WORLD_RANK)
    send(None, dest_rank, RankType.WORLD_RANK)


def receive_checkpoint_files(ckpt_dir: str, src_rank: int) -> None:
    """Writes the files that a rank sends by `send_checkpoint_files` below `ckpt_dir`, in the folder that they have
    there.

    Errors:
        FormatError: a name leads out of the folder.
    """
    root = Path(ckpt_dir)
    while (came := recv_from(src_rank, RankType.WORLD_RANK)) is not None:
        name, begins, chunk = _checked(came)
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb" if begins else "ab", opener=own) as file:
            file.write(chunk)


def _chunks(path: Path) -> Iterator[tuple[bool, bytes]]:
    """The bytes of a file, at least once, and whether they begin it."""
    with path.open("rb") as file:
        begins = True
        while (chunk := file.read(_CHUNK_BYTES)) or begins:
            yield begins, chunk
            begins = False


def _checked(came: Any) -> tuple[str, bool, bytes]:
    name, begins, chunk = came
    parts = PurePosixPath(name).parts
    if not parts or parts[0] in ("/", "..") or ".." in parts:
        raise FormatError(f"a file of a checkpoint that is named {name} would be outside the folder")
    return name, begins, chunk
