# SPDX-License-Identifier: Apache-2.0
"""torch's process groups of this rank, one per axis. See [Note: axes]."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a default group, which would be its functions' for ever
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from lamina import _lamina
from lamina.errors import Error, PeerError, UsageError, refusal
from lamina.job import backend, current
from lamina.job.ranks import CommGroup, device

_AXES = ("mp", "dp", "pp", "tp", "rdp", "shard", "shard_copies", "shard_within", "shard_across", "node")


def take_ranks() -> None:
    """Sets RANK and WORLD_SIZE where nobody tells them, and the script has given them to torch's default group, as
    functions under `torch.multiprocessing.spawn` do."""
    told = any(_lamina.told(name) is not None for name in ("RANK", "WORLD_SIZE"))
    if told or not all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
        return
    if dist.is_available() and dist.is_initialized():
        os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))


class ProcessGroups:
    """This rank's groups; making them is collective over the world.

    torch's default group is made unless the script has made it: then that one is the world's, and stays the script's.
    """

    def __init__(self, session: _lamina.Session):
        self.stuck: Callable[[], bool] = lambda: False  # tells of a collective that was left and may never end
        self._session = session
        self._made_default = not dist.is_initialized()
        mine = {axis: tuple(session.group_members(axis)) for axis in _AXES}
        if not session.are_alike("world", str(self._made_default)):
            _check_default(session.all_gather("world", self._made_default))
        if not self._made_default and (dist.get_rank(), dist.get_world_size()) != (session.rank, session.size):
            raise UsageError(
                f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but this is "
                f"rank {session.rank} of {session.size}: initialise it with the ranks of the job, which a launcher or "
                "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say before lamina.init",
                code="group-torch-differs",
            )
        # Every rank takes part in making every group, in the same order.
        every_group = dict.fromkeys(
            tuple(session.group_members(axis, rank)) for rank in range(session.size) for axis in _AXES
        )
        timeout = timedelta(seconds=session.config.timeout_s)
        try:
            with backend.made_for(session, session.config.timeout_s), _telling_of_losses(session):
                if self._made_default:
                    make_default(session, timeout, _backends(session))
                made = {ranks: dist.new_group(list(ranks), timeout, _backends(session)) for ranks in every_group}
        except BaseException:
            _destroy([], self._made_default)  # those who are left may make others
            raise
        self._made = {id(group) for group in (dist.group.WORLD, *made.values())}
        self._by_axis = {"world": dist.group.WORLD} | {axis: made[ranks] for axis, ranks in mine.items()}
        session.make_groups_by(self.get)

    def get(self, axis: str) -> dist.ProcessGroup:
        """The group of that axis that this rank is in."""
        return self._by_axis[axis]

    def foreign(self) -> int:
        """How many others end with them."""
        return sum(id(group) not in self._made for group in all_of_torch()) if self._made_default else 0

    def close(self, at_exit: bool = False) -> bool:
        """Gives the groups up, at exit the script's default group as well: a Gloo group that is alive when Python ends
        aborts the process. False when a collective may never end: its group would wait for it."""
        stuck = self.stuck() or self._session.stuck
        self.stuck = lambda: stuck  # whom it asked may go
        if stuck:
            return False
        own = {id(group): group for axis, group in self._by_axis.items() if axis != "world"}
        self._by_axis.clear()
        _destroy(list(own.values()), self._made_default or at_exit)
        return True


def of_job() -> ProcessGroups:
    """The groups of the current job, made the first time; then collective over the world.

    Errors:
        UsageError: `ddp` is off, or inside a step function.
    """
    job = current.job()
    if not job.session.config.ddp:
        raise refusal("needs-ddp", "a process group")
    return job.own(_made)


def _made() -> ProcessGroups:
    job = current.outside_step("the first use of process groups")
    groups = ProcessGroups(job.session)
    job.closers.append(groups.close)
    return groups


def get_world_process_group() -> dist.ProcessGroup:
    """All ranks of the job, for torch.distributed. Needs `ddp`; the first call of any of these functions is collective,
    unless there is a DistributedModel."""
    return of_job().get("world")


def get_mp_process_group() -> dist.ProcessGroup:
    """The ranks that hold one copy of the model, for torch.distributed; see `get_world_process_group`."""
    return of_job().get("mp")


def get_dp_process_group() -> dist.ProcessGroup:
    """The ranks that read different data, for torch.distributed; see `get_world_process_group`."""
    return of_job().get("dp")


def get_pp_process_group() -> dist.ProcessGroup:
    """The partitions of one copy of the model, for torch.distributed; see `get_world_process_group`."""
    return of_job().get("pp")


def get_tp_process_group() -> dist.ProcessGroup:
    """The slices of the same layers, for torch.distributed; see `get_world_process_group`."""
    return of_job().get("tp")


def get_rdp_process_group() -> dist.ProcessGroup:
    """The copies of the same part of the model, for torch.distributed; see `get_world_process_group`."""
    return of_job().get("rdp")


def get_device_mesh(group: CommGroup | None = None) -> DeviceMesh:
    """The ranks as torch's DeviceMesh, made of the groups that the functions above return.

    Args:
        group: of one dimension, the ranks of that group, which is its name: "pp", "dp", ... None: all ranks of the job
            by their coordinates, with the dimensions "rdp", "pp" and "tp".

    Errors:
        UsageError: `ddp` is off, or inside a step function.
    """
    groups, kind = of_job(), device().type
    if group is not None:
        axis = CommGroup(group).value
        return DeviceMesh.from_group(groups.get(axis), kind, mesh_dim_names=(axis,))
    session = current.session()
    axes = ("rdp", "pp", "tp")
    mesh = torch.empty([session.group_size(axis) for axis in axes], dtype=torch.int)
    for rank in range(session.size):
        mesh[tuple(session.group_members(axis, rank).index(rank) for axis in axes)] = rank
    return DeviceMesh.from_group([groups.get(axis) for axis in axes], kind, mesh, mesh_dim_names=axes)


@contextlib.contextmanager
def _telling_of_losses(session: _lamina.Session) -> Iterator[None]:
    """torch's errors of groups that could not be made, as lamina's: a rank that is lost is named."""
    try:
        yield
    except Error:
        raise
    except RuntimeError as error:  # all of torch.distributed's are
        said = f"the process groups could not be made: {str(error).partition(chr(10))[0]}"
        losses = filter(None, (session.loss(rank, 1.0 if rank == 0 else 0.0) for rank in range(session.size)))
        raise PeerError(f"{said}; {loss}" if (loss := next(losses, "")) else said, code="group-not-made") from error


def _backends(session: _lamina.Session) -> str:
    """Ours for tensors of the CPU, or Gloo where `ddp_dist_backend` asks for the plain one. For those of an accelerator
    what torch names; Gloo for CUDA's where ranks share one of its devices, which NCCL refuses. A group of torch's has
    one backend that torch does not know by itself: beside such a one of the accelerator, Gloo is the CPU's."""
    cpu, kind = backend.NAME if session.config.ddp_dist_backend == "auto" else "gloo", device().type
    if kind == "cpu":
        return cpu
    shares = kind == "cuda" and _lamina.shares_devices()
    there = "gloo" if shares else dist.get_default_backend_for_device(kind)
    if dist.Backend.backend_type_map.get(there) == dist.ProcessGroup.BackendType.CUSTOM:
        cpu = "gloo"
    return f"cpu:{cpu},{kind}:{there}"


def _check_default(missing: list[bool]) -> None:
    if any(missing) and not all(missing):
        raise UsageError(
            f"rank {missing.index(False)} called torch.distributed.init_process_group and rank {missing.index(True)} "
            "did not: call it on all ranks, or on none",
            code="group-torch-differs",
        )


def make_default(world: _lamina.Session | _lamina.World, timeout: timedelta, backend: str) -> None:
    """As init_process_group() would, with names of its own in a store that may outlive the job: torchrun's does."""
    if world.launched:
        _publish(world)
        told = _lamina.read_world()
        # Gloo would listen where the machine's name leads, which may be its loopback device.
        if interface := _lamina.interface_of(told):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # torch's store would listen on every network: while this one lives, it shares that.
        held = _lamina.JobStore(told, timeout.total_seconds())
        # libuv's server asks for the name of whoever connects, and serves nobody meanwhile.
        store, _, _ = next(rendezvous("env://?use_libuv=0", timeout=timeout))
        del held
    else:
        store = dist.HashStore()
    store.set_timeout(timeout)
    store = dist.PrefixStore(_lamina.next_meeting("groups"), store)
    before = sys.excepthook
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    if sys.excepthook is not before:
        sys.excepthook._lamina_before = before


def _publish(joined: _lamina.Session | _lamina.World) -> None:
    """Without torchrun torch, and scripts, find in the environment what it would have set."""
    world = _lamina.read_world()
    told = {"RANK": world.rank, "WORLD_SIZE": world.size, "MASTER_ADDR": world.master_addr,
            "MASTER_PORT": world.master_port}  # fmt: skip
    if world.local_size:
        told["NODE_RANK"] = world.node_rank
    if world.local_size or isinstance(joined, _lamina.Session):  # whose ranks have told each other where they are
        told |= {"LOCAL_RANK": joined.local_rank, "LOCAL_WORLD_SIZE": joined.local_size}
    for name, value in told.items():
        os.environ.setdefault(name, str(value))


def _destroy(groups: list[dist.ProcessGroup], default: bool) -> None:
    if not dist.is_initialized():  # the script destroyed them all
        return
    if default:
        dist.destroy_process_group()
        # Torch's goes with the group: else jobs that change their layout would each show their rank once more.
        sys.excepthook = getattr(sys.excepthook, "_lamina_before", sys.excepthook)
        return
    for group in groups:
        with contextlib.suppress(ValueError):  # the script destroyed it
            dist.destroy_process_group(group)


def foreign_of_torch(job: current.Job) -> int:
    """How many groups that the script has made end with the default group that the job has made."""
    made = job.own_if_any(_made)
    return 0 if made is None else made.foreign()


def all_of_torch() -> list[dist.ProcessGroup]:
    """All groups that torch.distributed knows."""
    return list(dist.distributed_c10d._world.pg_map)
