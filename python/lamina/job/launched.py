# SPDX-License-Identifier: Apache-2.0
"""python -m lamina.job.launched FOLDER: a rank of `lamina.launch`."""

import multiprocessing
import multiprocessing.spawn
import os
import pickle
import sys
import time
from pathlib import Path

from lamina.errors import CancelledError, PeerError, RemoteError, UsageError
from lamina.exits.failures import describe
from lamina.job.launching import by_value


def main(folder: Path) -> None:
    """Calls the function, and leaves what it returned or raised."""
    rank = int(os.environ["RANK"])
    process = multiprocessing.current_process()
    process._inheriting = True
    try:
        multiprocessing.spawn.prepare(pickle.loads((folder / "facts").read_bytes()))
        function, args, keywords = by_value().loads((folder / "call").read_bytes())
    except BaseException as error:
        _leave(folder / f"error.{rank}", pickle.dumps(_told(error, rank)))
        raise
    finally:
        del process._inheriting
    try:
        value = function(*args, **keywords)
        try:
            value = by_value().dumps(value)
        except Exception as error:
            raise UsageError(
                f"what the function returned goes to who called launch(), and cannot be pickled: {error}",
                code="run-function-pickle",
            ) from None
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            _leave(folder / f"error.{rank}", pickle.dumps(_told(error, rank)))
            raise
        value = pickle.dumps(None)
    _leave(folder / f"result.{rank}", value)


def _told(error: BaseException, rank: int) -> tuple:
    """An error with what it is sorted by: those that another rank has caused come last."""
    caused = isinstance(error, PeerError | CancelledError) or getattr(error, "rank", rank) not in (rank, -1)
    return isinstance(error, RemoteError) or caused, time.time(), describe(error, rank)


def _leave(path: Path, content: bytes) -> None:
    new = path.with_name(f"new.{path.name}")
    new.write_bytes(content)
    new.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
