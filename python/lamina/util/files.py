# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from typing import BinaryIO

from lamina import _lamina


def own(path: str, flags: int) -> int:
    """The `opener` of files that others could have put something in the place of: they are regular files of this user
    with one name, and no link is followed.

    Errors:
        OSError: something else lies there.
    """
    return _lamina.open_output(path, flags)


@contextlib.contextmanager
def replacing(path: str, owner: int) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends well: until then, and when it or the process
    fails, what was there before stays. When it has ended, the file is on the disk.

    Args:
        path: the file; its folder exists.
        owner: of several processes that write the same path, which this is. What a killed one leaves, its successor
            overwrites.

    Errors:
        OSError: the folder does not exist, cannot be written to, or is full.
    """
    temporary = f"{path}.{owner}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    try:
        with open(temporary, "x+b") as file:  # never what others may have put there
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(os.path.dirname(path) or ".")


def first_os_error(error: BaseException | None) -> OSError | None:
    """Returns what the system said: torch's writer says something else about it when it is closed."""
    found = None
    while error is not None:
        found = error if isinstance(error, OSError) else found
        error = error.__context__
    return found


def _sync_folder(folder: str) -> None:
    """The new name of a file in it is on the disk, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
