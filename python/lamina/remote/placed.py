# SPDX-License-Identifier: Apache-2.0
"""Modules and parameters that one rank owns and others call and train: lamina/parameter_server."""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError
from lamina.job import current

_MAKER = "lamina.make"
_GET = "__get__"  # in place of a method: the parameter itself


class _Known:
    """Handles of a job that this rank has seen."""

    def __init__(self) -> None:
        self.makers: dict[int, tuple[int, int, int]] = {}  # by the rank that owns each
        self.shared: set[tuple[bool, tuple[int, int, int]]] = set()


@dataclass(frozen=True)
class RemoteParameter:
    """A parameter that lies on its owner. Any rank may have it: it may be sent, and kept.

    Attributes:
        owner: the rank.
        name: its name in the module; "" for one that was placed alone.
        shape, dtype, requires_grad: as it was when it was placed.
    """

    owner: int
    name: str
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    _address: tuple[int, int, int]
    _module: tuple[int, int, int]
    _label: str

    def __getstate__(self) -> dict[str, Any]:
        share(self._module, is_module=True)
        return self.__dict__

    def to_here(self) -> torch.Tensor:
        """Its value now, a copy. In a context its gradient goes to the owner.

        Errors:
            PeerError: the owner is lost. TimeoutError: it did not answer within `timeout_s`.
        """
        return _call(self._module, f"{self._label}.{self.name}" if self.name else self._label, _GET, (self.name,), {})


@dataclass(frozen=True)
class RemoteModule:
    """A module that runs on its owner, whoever calls it. Any rank may have it: it may be sent, and kept.

    Attributes:
        owner: the rank.
        name: by which `find` finds it; "" where it has none.
    """

    owner: int
    name: str
    _address: tuple[int, int, int]
    _parameters: tuple[RemoteParameter, ...]

    def __getstate__(self) -> dict[str, Any]:
        share(self._address, is_module=True)
        return self.__dict__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward on the owner, where calls take turns, and waits for its result. In a context, and
        unless under `torch.no_grad()`, the result has a history, through which `lamina.remote.backward` goes; else it
        has none.

        Errors:
            RemoteError: what the module raised, as its own type, with the owner's traceback.
            PeerError: the owner is lost. TimeoutError: it did not answer within `timeout_s`.
            UsageError: an argument that cannot travel; a module of another job.
        """
        return _call(self._address, self._label, "", args, kwargs)

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls another method of the module on its owner: `net.run("eval")`, `net.run("state_dict")`. What it returns
        is a copy; a module that returns itself returns None.

        Args:
            method: its name.
            args, kwargs: its arguments, which are sent.

        Errors: as a call.
        """
        return _call(self._address, f"{self._label}.{method}", method, args, kwargs)

    def parameters(self) -> list[RemoteParameter]:
        """Its parameters, for an optimizer."""
        return list(self._parameters)

    def named_parameters(self) -> Iterator[tuple[str, RemoteParameter]]:
        """Its parameters by their names."""
        return ((parameter.name, parameter) for parameter in self._parameters)

    @property
    def _label(self) -> str:
        return self.name or f"module {self._address[2]}"


def share(address: tuple[int, int, int], *, is_module: bool) -> None:
    """Tells the owner of a module or an optimizer, before another rank may have it, that others will name it: see
    [Note: release] in lamina/parameter_server/owned.h. Its own handles go to their maker alone."""
    job = current.job_if_any()
    if job is None or address[0] == job.session.rank:
        return
    shared = job.own(_Known).shared
    if (is_module, address) not in shared:
        job.session.share_remote(is_module, address)
        shared.add((is_module, address))


def place(
    what: nn.Module | torch.Tensor | Callable[..., nn.Module | torch.Tensor],
    owner: int | None = None,
    *,
    name: str = "",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> RemoteModule | RemoteParameter:
    """Puts a module, or a parameter, on a rank, which owns it from then on, until the job ends.

    Args:
        what: a module or a tensor, of which another rank gets a copy, while this one serves the very object; or a class
            or function that makes one on the owner.
        owner: the rank, by default this one.
        name: by which other ranks find it.
        args, kwargs: of a class or function.

    Returns:
        A `RemoteModule`, or for a tensor a `RemoteParameter`.

    Errors:
        UsageError: no such rank, a name that is taken there, or an object that cannot be sent. And what the class
            raises there.
    """
    session = current.outside_step("lamina.remote.place()").session
    if not isinstance(name, str):
        raise UsageError(f"lamina.remote.place(name={name!r}): a name is a string")
    if not callable(what) and not isinstance(what, torch.Tensor):
        raise UsageError(
            f"lamina.remote.place() takes a module, a tensor, or a class that makes one, not {type(what).__name__}"
        )
    if isinstance(what, (nn.Module, torch.Tensor)) and (args or kwargs):
        raise UsageError("lamina.remote.place(): `args` and `kwargs` are those of a class or function")
    owner = session.rank if owner is None else require_rank(session, owner, "lamina.remote.place()")
    if owner == session.rank:
        return place_here(what, name, tuple(args), dict(kwargs or {}))
    return run_on(owner, place_here, what, name, tuple(args), dict(kwargs or {}))


def find(name: str, owner: int) -> Any:
    """Finds what the rank `owner` has placed by that name, or places within `timeout_s`: a RemoteModule or a
    RemoteParameter.

    Errors:
        UsageError: no such rank. PeerError: it is lost. TimeoutError: it has placed nothing by that name.
    """
    session = current.outside_step("lamina.remote.find()").session
    return _rebuilt(session.find(require_rank(session, owner, "lamina.remote.find()"), name))


def serve() -> None:
    """Waits until every other rank has left the job (`lamina.shutdown()`, or the end of its process) or is lost. A rank
    serves what it owns from `lamina.init()` on, whatever its program does: one that does nothing else calls this.

    Errors:
        TimeoutError: no request came for `timeout_s`, and there are ranks that have not left.
    """
    current.outside_step("lamina.remote.serve()").session.serve()


def require_rank(session: _lamina.Session, rank: int, what: str) -> int:
    """Returns the rank; raises UsageError where the job has no such one."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < session.size:
        raise UsageError(f"{what}: there is no rank {rank!r}; the job has {session.size}")
    return rank


def run_on(owner: int, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of lamina's on another rank, in its turn there. Errors: as a call of a module."""
    session, makers = current.session(), current.job().own(_Known).makers
    if owner not in makers:
        makers[owner] = session.find(owner, _MAKER)[:3]
    try:
        data = io.BytesIO()
        pickle.Pickler(data, protocol=pickle.HIGHEST_PROTOCOL).dump((function, args))
    except Exception as error:
        raise UsageError(
            f"this cannot be sent to rank {owner}: {type(error).__name__}: {error}", code="step-cannot-travel"
        ) from error
    return session.call_placed(makers[owner], f"{_MAKER}: {function.__name__}", (data.getvalue(),))


def make_remote(data: bytes) -> Any:
    """The other end of `run_on`, which the engine calls."""
    function, args = pickle.loads(data)
    return function(*args)


def place_here(what: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> RemoteModule | RemoteParameter:
    """See `place`."""
    made = what if isinstance(what, (nn.Module, torch.Tensor)) else what(*args, **kwargs)
    if isinstance(made, nn.Module):
        parameters = list(made.named_parameters())
    elif isinstance(made, torch.Tensor):
        parameters = [("", made)]
    else:
        raise UsageError(f"{what!r} made a {type(made).__name__}: lamina.remote places modules and tensors")
    return _rebuilt(current.session().place(name, _Served(made, dict(parameters)).run, parameters))


class _Served:
    """A module or a parameter, as the engine calls it on the owner."""

    def __init__(self, module: nn.Module | torch.Tensor, parameters: dict[str, torch.Tensor]):
        self._module = module
        self._parameters = parameters

    def run(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if method == _GET:
            return self._parameters[args[0]]
        result = getattr(self._module, method)(*args, **kwargs) if method else self._module(*args, **kwargs)
        return None if result is self._module else result


def _call(address: tuple[int, int, int], label: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    session = current.outside_step(f"a call of {label}, which lamina.remote has placed,").session
    return session.call_placed(address, label, (method, args, kwargs))


def _rebuilt(told: tuple) -> RemoteModule | RemoteParameter:
    """As the engine tells of it: see to_remote_module() in lamina/parameter_server/protocol.cc."""
    owner, job, number, name, rows = told
    if (kept := "lamina.remote has placed modules or parameters") not in (fixed_by := current.job().fixed_by):
        fixed_by.append(kept)
    address = owner, job, number
    module = RemoteModule(owner, name, address, ())
    parameters = tuple(
        RemoteParameter(owner, key, torch.Size(sizes), dtype, trained, (owner, job, place), address, module._label)
        for place, key, sizes, dtype, trained in rows
    )
    if len(parameters) == 1 and not parameters[0].name:
        return parameters[0]
    return RemoteModule(owner, name, address, parameters)
