# SPDX-License-Identifier: Apache-2.0
"""torch's default process group, from the environment of any launcher."""

import atexit
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lamina import _lamina
from lamina.dist import ranks
from lamina.dist.collectives import typed
from lamina.errors import ConfigError, UsageError
from lamina.exits import excepthook
from lamina.job.groups import make_default
from lamina.job.ranks import likely_device

# Backends of a process group by kinds of device, and the one that serves the tensors there. Accelerators are torch's.
_SERVES = {"cpu": "cpu:gloo", "mps": "cpu:gloo", "tpu": "xla:xla"}
_BACKENDS = {"cpu": "gloo", "mps": "gloo", "tpu": "xla"}

_maker = 0  # the process that made the group: a fork of it must not end it


def initialize_dist(device: Any = None, timeout: float = 300.0) -> None:
    """Makes torch's default process group; every rank calls it. Ranks, address and port are what torchrun,
    `lamina run`, srun or mpirun say; a script that nobody launched is a world of one, which opens no port. Does nothing
    when there is a group for that device already.

    Args:
        device: "cpu", "gpu" for an accelerator of any type, such a type, "mps" or "tpu", a torch.device, or an
            object with such a `name`; None: the rank's, see `lamina.init`.
        timeout: how many seconds the ranks, and each collective, wait for each other.

    Errors:
        ConfigError: an unknown device, a timeout that is none, an environment that does not say who this rank is, two
            processes with one rank, or ranks that know of different numbers of ranks.
        UsageError: there is a group already, for other devices.
        TimeoutError: ranks did not come in time; it names them.
        PeerError: a rank came and went.
    """
    global _maker
    kind = _kind(device)
    if not timeout > 0:
        raise ConfigError(f"initialize_dist: timeout: {timeout} is not allowed; expected seconds above 0")
    if ranks.is_initialized():
        _require(kind)
        return
    if kind == "tpu" and not dist.is_backend_available("xla"):
        raise ConfigError("initialize_dist: the device tpu needs torch_xla's backend, which is not here: import it")
    world = _lamina.world_to_meet()
    with typed(f"initialize_dist at {world.master_addr}:{world.master_port}"):
        # It hosts the store until torch's own group does.
        meeting = _lamina.Meeting(world, "dist/python", timeout) if world.launched else None
        make_default(world, timedelta(seconds=timeout), _BACKENDS.get(kind) or f"cpu:gloo,{_serving(kind)}")
        del meeting
    _maker = os.getpid()
    excepthook.install()


def _kind(device: Any) -> str:
    """A key of `_SERVES`, or the type of the accelerator.

    Errors:
        ConfigError: there is none, or no such kind.
    """
    if device is None:
        return likely_device().type
    name = device if isinstance(device, str) else getattr(device, "type", getattr(device, "name", device))
    if name in _SERVES:
        return name
    own = torch.accelerator.current_accelerator(check_available=True)
    if name == "gpu" and own is None:
        raise ConfigError('initialize_dist: torch sees no GPU here: use the device "cpu"')
    if own is None or name not in ("gpu", own.type):
        known = dict.fromkeys(("cpu", "gpu", *_SERVES, *([] if own is None else [own.type])))
        raise ConfigError(f"initialize_dist: device: {name!r} is not allowed; it must be one of {', '.join(known)}")
    return own.type


def _serving(kind: str) -> str:
    return _SERVES.get(kind) or f"{kind}:{dist.get_default_backend_for_device(kind)}"


def _require(kind: str) -> None:
    there = dist.get_backend_config()
    if _serving(kind) not in there.split(","):
        raise UsageError(
            f"initialize_dist: the device {kind} needs {_serving(kind)}, but torch.distributed was initialised with "
            f"{there}: use that, or end it with torch.distributed.destroy_process_group() first"
        )


def _at_exit() -> None:
    """A Gloo group that is alive when Python ends aborts the process."""
    if _maker == os.getpid() and ranks.is_initialized():
        dist.destroy_process_group()


atexit.register(_at_exit)  # before lamina's own, which knows of groups that cannot be ended: so it runs after that
