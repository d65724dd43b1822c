# SPDX-License-Identifier: Apache-2.0
"""Identity of this rank: its coordinates on the axes of the job, which [Note: axes] in lamina/topology/placement.h
names. A group of an axis is the ranks that differ in that axis alone."""

import enum

import torch

from lamina import _lamina
from lamina.errors import refusal
from lamina.job import current


class CommGroup(enum.Enum):
    """A group of ranks that this rank belongs to. See [Note: axes]."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(enum.Enum):
    """How a rank is counted: in the world, or within one of this rank's groups. See [Note: axes]."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


WORLD, MP_GROUP, DP_GROUP, PP_GROUP, TP_GROUP, RDP_GROUP = CommGroup
WORLD_RANK, MP_RANK, DP_RANK, PP_RANK, TP_RANK, RDP_RANK = RankType


def rank() -> int:
    """This rank in the world. Before `init` and after `shutdown` it is what the launcher says; 0 without one."""
    return _in_job_or_told("rank", "RANK", 0)


def size() -> int:
    """The number of ranks in the job; without a job as `rank`, and 1 without a launcher."""
    return _in_job_or_told("size", "WORLD_SIZE", 1)


def device() -> torch.device:
    """The device that this rank computes on: the CPU before `init`, then what the key `device` has chosen."""
    return _lamina.rank_device()


def likely_device() -> torch.device:
    """The rank's device in a job; without one that which a job gets by default, see `lamina.init`.

    Errors:
        ConfigError: LAMINA_DEVICE names none of this machine.
    """
    return device() if current.is_initialized() else _lamina.chosen_device("auto")


def local_rank() -> int:
    """This rank among those of its machine; without a job as `rank`.

    Errors:
        UsageError: there is no job, and the launcher does not say: ranks tell each other in `init`.
    """
    return _in_job_or_told("local_rank", "LOCAL_RANK", 0)


def local_size() -> int:
    """The number of ranks on this machine; without a job as `size`, errors as `local_rank`."""
    return _in_job_or_told("local_size", "LOCAL_WORLD_SIZE", 1)


def _in_job_or_told(name: str, variable: str, alone: int) -> int:
    if (job := current.job_if_any()) is not None:
        return getattr(job.session, name)
    if (value := _lamina.told(variable)) is not None:
        return value
    if (_lamina.told("WORLD_SIZE") or 1) > 1:
        raise refusal("not-initialised", "lamina.init()")
    return alone


def num_microbatches() -> int:
    """The number of microbatches that a step's batch is split into."""
    return current.job().microbatches


def set_num_microbatches(microbatches: int) -> None:
    """Says into how many microbatches a step splits its batch from now on, in the place of the key `microbatches`.
    Every rank calls it alike.

    Errors:
        UsageError: no number, 1 or more; inside a step function.
    """
    job = current.outside_step("set_num_microbatches()")
    if type(microbatches) is not int or microbatches < 1:
        raise refusal("not-a-count", "set_num_microbatches()", repr(microbatches))
    job.session.microbatches = microbatches


def mp_rank() -> int:
    """This rank among the ranks that hold one copy of the model."""
    return current.session().group_rank("mp")


def mp_size() -> int:
    """The number of the ranks that hold one copy of the model."""
    return current.session().group_size("mp")


def get_mp_group() -> list[int]:
    """The world ranks of the ranks that hold one copy of the model."""
    return current.session().group_members("mp")


def dp_rank() -> int:
    """This rank among the ranks that read different data."""
    return current.session().group_rank("dp")


def dp_size() -> int:
    """The number of the ranks that read different data."""
    return current.session().group_size("dp")


def get_dp_group() -> list[int]:
    """The world ranks of the ranks that read different data."""
    return current.session().group_members("dp")


def pp_rank() -> int:
    """This rank among the partitions of one copy of the model."""
    return current.session().group_rank("pp")


def pp_size() -> int:
    """The number of the partitions of one copy of the model."""
    return current.session().group_size("pp")


def get_pp_group() -> list[int]:
    """The world ranks of the partitions of one copy of the model."""
    return current.session().group_members("pp")


def tp_rank() -> int:
    """This rank among the slices of the same layers."""
    return current.session().group_rank("tp")


def tp_size() -> int:
    """The number of the slices of the same layers."""
    return current.session().group_size("tp")


def get_tp_group() -> list[int]:
    """The world ranks of the slices of the same layers."""
    return current.session().group_members("tp")


def rdp_rank() -> int:
    """This rank among the copies of the same part of the model."""
    return current.session().group_rank("rdp")


def rdp_size() -> int:
    """The number of the copies of the same part of the model."""
    return current.session().group_size("rdp")


def get_rdp_group() -> list[int]:
    """The world ranks of the copies of the same part of the model."""
    return current.session().group_members("rdp")
