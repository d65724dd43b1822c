# SPDX-License-Identifier: Apache-2.0
"""Identity of this process: what torch's default process group says, else the launcher, else a world of one."""

import os
from collections.abc import Callable

import torch.distributed as dist

from lamina import _lamina
from lamina.errors import ConfigError, UsageError


class MissingEnvironmentError(ConfigError):
    """torch.distributed runs, but no launcher's environment tells what was asked."""


def is_available() -> bool:
    """True where this torch has torch.distributed."""
    return dist.is_available()


def is_initialized() -> bool:
    """True where torch's default process group exists."""
    return dist.is_available() and dist.is_initialized()


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks in the job, or in the group.

    Errors:
        UsageError: WORLD_SIZE says otherwise than torch.distributed.
    """
    return _known("WORLD_SIZE", 1, dist.get_world_size, group)


def get_global_rank(group: dist.ProcessGroup | None = None) -> int:
    """This rank in the world, from 0, or in the group.

    Errors:
        UsageError: RANK says otherwise than torch.distributed.
    """
    return _known("RANK", 0, dist.get_rank, group)


def get_local_world_size() -> int:
    """The number of ranks on this machine. MissingEnvironmentError where torch.distributed runs and nobody tells."""
    return _told("LOCAL_WORLD_SIZE", 1)


def get_local_rank() -> int:
    """This rank among those of its machine, from 0; errors as `get_local_world_size`."""
    return _told("LOCAL_RANK", 0)


def get_node_rank() -> int:
    """This machine among those of the job, from 0; errors as `get_local_world_size`."""
    return _told("NODE_RANK", 0)


def _told(name: str, alone: int) -> int:
    """Returns what the launcher says; `alone` where there is none."""
    if (value := _lamina.told(name)) is not None:
        return value
    if is_initialized() and dist.get_world_size() > 1:
        raise MissingEnvironmentError(
            f"{name} is not set, and no launcher tells it, although torch.distributed runs: start the script with "
            "`lamina run` or torchrun, or set it",
            code="group-no-launcher",
        )
    return alone


def _known(name: str, alone: int, ask: Callable, group: dist.ProcessGroup | None) -> int:
    """Returns what torch says by `ask`, where it is initialised; of the world the environment has to say the same."""
    if not is_initialized():
        return _told(name, alone)
    value = ask(group)
    if _lamina.is_newcomer():  # in a world of its own, until it has joined
        return value
    if group is None and name in os.environ and (said := _lamina.told(name)) != value:
        raise UsageError(
            f"{name} is {said} in the environment, but {value} for torch.distributed: initialise it with "
            "the ranks that the launcher gave",
            code="group-torch-differs",
        )
    return value
