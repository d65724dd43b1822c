# SPDX-License-Identifier: Apache-2.0
"""Objects in files: one per rank, or one for all.

[Note: partial files] With `partial` each rank that holds another part of the model has a file of its own, named
`f_{mp_rank}`. When layers are sliced it is `f_{pp_rank}_{tp_rank}`. With `v3`, and where parameters are sharded, every
rank has one, `f_{pp_rank}_{tp_rank}_{rdp_rank}`. Such a file knows how many ranks there were, so that it is not
mistaken for one of another job.
"""

import errno
import glob
import os
import pickle
from types import ModuleType
from typing import Any

import torch

from lamina.errors import UsageError
from lamina.job import current
from lamina.saved_state import archives
from lamina.util.checks import require_local
from lamina.util.files import first_os_error, replacing


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Saves an object, as torch.save does. What was there before stays until the new file is whole and on the disk.

    Args:
        obj: any picklable object; of a model or an optimizer, its state dict.
        f: the name of the file.
        partial: each rank of a model's copy saves a file of its own, see [Note: partial files]. Otherwise the one file
            is written by mp_rank 0; the others, which have the same, write nothing.
        pickle_module, pickle_protocol: as torch.save's.
        v3: a file for every rank, by the third of the names in [Note: partial files].

    Errors:
        UsageError: `f` is no name, or called inside a step function. OSError: the file cannot be written.
    """
    session = current.outside_step("save()").session
    path = _checked(f, "save")
    if not partial and session.group_rank("one_copy") != 0:
        return
    path = _name(session, path, v3) if partial else path
    try:
        with replacing(path, session.rank) as file:
            torch.save(obj, file, pickle_module, pickle_protocol)
            if partial:
                archives.note(file, _ranks(session, v3))
    except (OSError, RuntimeError) as error:
        cause = first_os_error(error)
        if cause is None:
            raise
        raise _explained(cause, f"save() on rank {session.rank} cannot write", path) from error


def load(
    f: str,
    map_location: Any = None,
    pickle_module: ModuleType = pickle,
    partial: bool = True,
    back_compat: bool = False,
    v3: bool = False,
    **pickle_load_args: Any,
) -> Any:
    """Loads what `save` has saved, or a file of torch.save. The file may hold any object: load only what you trust.

    Args:
        f: the name that was given to `save`.
        map_location, pickle_module: as torch.load's.
        partial, v3: as given to `save`. A file that was saved with `v3` is found without it, too.
        back_compat: the file is `f_{mp_rank}` also when layers are sliced.
        **pickle_load_args: more of torch.load's arguments.

    Errors:
        UsageError: `f` is no name, the file was saved by another number of ranks, or called inside a step function.
        FileNotFoundError, another OSError: the file cannot be read. FormatError: it is not whole, or something else.
    """
    session = current.outside_step("load()").session
    path = _checked(f, "load")
    if partial:
        v3 = v3 or _only_of_every_rank(session, path, back_compat)
        path = _name(session, path, v3, back_compat)
    arguments = {"weights_only": False} | pickle_load_args
    if not arguments["weights_only"]:
        arguments["pickle_module"] = pickle_module
    try:
        archives.check(path, _ranks(session, v3) if partial else None, whole=not arguments.get("mmap"))
        return torch.load(path, map_location, **arguments)
    except FileNotFoundError:
        raise _not_there(session, path, os.fspath(f), partial, v3) from None
    except OSError as error:
        raise _explained(error, f"load() on rank {session.rank} cannot read", path) from error
    except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
        if archives.is_zip(path):
            raise  # the file is whole: what is in it cannot be had here
        raise archives.damaged(path, str(error)) from error


def _checked(f: Any, what: str) -> str:
    if not isinstance(f, (str, os.PathLike)):
        raise UsageError(f"{what}() takes the name of a file, not {type(f).__name__}")
    require_local(f=f)
    return os.fspath(f)


def _name(session: Any, path: str, v3: bool, back_compat: bool = False) -> str:
    """See [Note: partial files]."""
    pp, tp, rdp = (session.group_rank(axis) for axis in ("pp", "tp", "rdp"))
    if _of_every_rank(session, v3):
        return f"{path}_{pp}_{tp}_{rdp}"
    if session.group_size("tp") > 1 and not back_compat:
        return f"{path}_{pp}_{tp}"
    return f"{path}_{session.group_rank('mp')}"


def _only_of_every_rank(session: Any, path: str, back_compat: bool) -> bool:
    """True where there is no other file than that of the third of the names."""
    return not os.path.exists(_name(session, path, False, back_compat)) and os.path.exists(_name(session, path, True))


def _of_every_rank(session: Any, v3: bool) -> bool:
    """True where every rank has a file of its own: replicas that have different shards need one."""
    return v3 or session.group_size("shard") > 1


def _ranks(session: Any, v3: bool) -> dict[str, int]:
    """How many ranks there are that save a file each."""
    return {axis: session.group_size(axis) for axis in ("pp", "tp", *(("rdp",) if _of_every_rank(session, v3) else ()))}


def _explained(error: OSError, what: str, path: str) -> OSError:
    """An error of the same kind that says who wanted what."""
    return OSError(error.errno, f"{what}: {error.strerror or error}", path)


def _not_there(session: Any, path: str, f: str, partial: bool, v3: bool) -> OSError | UsageError:
    """The error for a file that does not exist, with what is there instead."""
    others = sorted(other for other in glob.glob(f"{glob.escape(f)}_*") if not other.endswith(".tmp"))
    if partial:
        ranks = _ranks(session, v3)
        for other in others:
            noted = archives.noted_in(other)
            if noted is not None and noted != ranks and noted.keys() == ranks.keys():
                return UsageError(archives.of_others(other, noted, ranks), code="state-other-ranks")
        hint = f"; there is {f} itself: load it with partial=False" if os.path.exists(f) else ""
    else:
        hint = f"; there is {others[0]}: load partial files with partial=True" if others else ""
    return FileNotFoundError(errno.ENOENT, f"load() on rank {session.rank}: there is no such file{hint}", path)
