# SPDX-License-Identifier: Apache-2.0
"""A file of torch.save, a zip archive, and what it tells of itself: whether it is whole, and how many ranks saved
one."""

import contextlib
import errno
import json
import os
import zipfile
from typing import BinaryIO

from lamina.errors import FormatError, UsageError

_RECORD = "lamina_ranks.json"


def note(file: BinaryIO, ranks: dict[str, int]) -> None:
    """Adds to a file of torch.save how many ranks saved one, by axis."""
    attach(file, _RECORD, json.dumps(ranks).encode())


def attach(file: BinaryIO, name: str, record: bytes) -> None:
    """Adds a record to a file of torch.save, which torch.load does not look at."""
    with zipfile.ZipFile(file, "a") as archive:
        folder = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{folder}/{name}", record)


def attached(path: str, name: str) -> bytes | None:
    """A record that was attached to a file; None where it has none."""
    if not is_zip(path):
        return None
    with zipfile.ZipFile(path) as archive:
        record = next((each for each in archive.namelist() if each.endswith(f"/{name}")), None)
        return archive.read(record) if record else None


def is_zip(path: str) -> bool:
    """The format that torch has written for long; before, a file was pickles."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _noted(archive: zipfile.ZipFile) -> dict[str, int] | None:
    """How many ranks there were when the file was saved; None where it does not say."""
    record = next((name for name in archive.namelist() if name.endswith(f"/{_RECORD}")), None)
    return json.loads(archive.read(record)) if record else None


def check(path: str, ranks: dict[str, int] | None, whole: bool) -> None:
    """Checks that a file was saved by that many ranks, where it says so; with `whole`, that its checksums are right.

    Errors:
        FormatError: it is damaged. UsageError: it is of other ranks. OSError: it cannot be read.
    """
    if not is_zip(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            noted = _noted(archive)
            wrong = archive.testzip() if whole else None
    except (zipfile.BadZipFile, EOFError) as error:
        raise damaged(path, str(error)) from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # it leads to before its beginning
            raise
        raise damaged(path, str(error)) from error
    if wrong:
        raise damaged(path, f"The checksum of {wrong} is wrong")
    if None not in (ranks, noted) and noted != ranks:
        raise UsageError(of_others(path, noted, ranks), code="state-other-ranks")


def noted_in(path: str) -> dict[str, int] | None:
    """How many ranks there were when that file was saved, None if nothing tells."""
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        return _noted(archive)
    return None


def damaged(path: str, why: str) -> FormatError:
    """The error for a file that is not what `save` wrote."""
    return FormatError(
        f"{path} ({os.path.getsize(path)} bytes) cannot be loaded: it was cut off or damaged, "
        f"or save() did not write it. {why.splitlines()[0] if why else 'It ends early'}",
        code="state-damaged",
    )


def of_others(path: str, noted: dict[str, int], ranks: dict[str, int]) -> str:
    """The text of the error for a file of a job of other ranks."""
    counts = (" x ".join(f"{axis} {count}" for axis, count in each.items()) for each in (noted, ranks))
    return (
        "{} was saved by a job of {} ranks, this one has {}: start as many, or save whole states with partial=False, "
        "which any number of ranks loads"
    ).format(path, *counts)
