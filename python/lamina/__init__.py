# SPDX-License-Identifier: Apache-2.0
"""Spreads a PyTorch model, and its training, over as many devices as it is given.

    lamina.init(partitions=2, microbatches=8)
    model = lamina.distribute(model)
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @lamina.step
    def train_step(x, y):
        loss = model(x, y)
        model.backward(loss)
        return loss

    for x, y in batches:
        loss = train_step(x, y).reduce_mean()
        optimizer.step()
        optimizer.zero_grad()

Started by `lamina run -n 2 train.py`. Everything else of the script stays as it is.
"""

import difflib as _difflib
import importlib.metadata as _metadata
from pathlib import Path as _Path

from lamina import torch_version as _torch_version  # noqa: F401 -- finds the engine

# isort: split
from lamina import amp as amp
from lamina import callbacks as _callbacks  # noqa: F401 -- hands the engine what it calls
from lamina import dist as dist
from lamina import nn as nn
from lamina import optim as optim
from lamina import optimizers as optimizers
from lamina import remote as remote
from lamina import state
from lamina.activation_checkpointing.api import checkpoint, checkpoint_sequential, set_activation_checkpointing
from lamina.checkpoints.loading import resume_from_checkpoint
from lamina.checkpoints.saving import CheckpointHandle, save_checkpoint
from lamina.composer import paths as _paths  # noqa: F401 -- offers Composer's names in lamina.trainer
from lamina.composer.trainer import Trainer
from lamina.deferred_init.creation import model_creation
from lamina.deferred_init.delayed import delay_param_initialization
from lamina.elastic.change import change
from lamina.elastic.run import Run
from lamina.errors import (
    CancelledError,
    ConfigError,
    DesyncError,
    Error,
    FileError,
    FormatError,
    InternalError,
    PeerError,
    RemoteError,
    TimeoutError,
    UsageError,
)
from lamina.job.current import is_initialized
from lamina.job.groups import (
    get_device_mesh,
    get_dp_process_group,
    get_mp_process_group,
    get_pp_process_group,
    get_rdp_process_group,
    get_tp_process_group,
    get_world_process_group,
)
from lamina.job.launching import launch
from lamina.job.lifetime import init, shutdown
from lamina.job.messages import allgather, barrier, broadcast, dp_barrier, mp_barrier, recv_from, send
from lamina.job.ranks import (
    DP_GROUP,
    DP_RANK,
    MP_GROUP,
    MP_RANK,
    PP_GROUP,
    PP_RANK,
    RDP_GROUP,
    RDP_RANK,
    TP_GROUP,
    TP_RANK,
    WORLD,
    WORLD_RANK,
    CommGroup,
    RankType,
    device,
    dp_rank,
    dp_size,
    get_dp_group,
    get_mp_group,
    get_pp_group,
    get_rdp_group,
    get_tp_group,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    num_microbatches,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    set_num_microbatches,
    size,
    tp_rank,
    tp_size,
)
from lamina.job.seeds import rng_step, set_rng_seed, set_rng_step
from lamina.model.whole_parameters import gathered_parameters, get_full_gradient, get_full_parameter
from lamina.modules.dynamic import set_dynamic
from lamina.modules.placement import partition, set_partition
from lamina.observe.metrics import JsonLines, Logger, Metrics, TensorBoard
from lamina.observe.timeline import timeline
from lamina.optim.optimizer import DistributedOptimizer
from lamina.pipeline.batches import Microbatches
from lamina.pipeline.distributed_model import DistributedModel, distribute
from lamina.pipeline.output import StepOutput
from lamina.pipeline.step import step
from lamina.planning.split import split_graph
from lamina.saved_state.saving import load, save
from lamina.tensor_parallel.marks import set_tensor_parallelism, tensor_parallelism
from lamina.tensor_parallel.registry import tp_register, tp_register_with_module
from lamina.tracing.trace import is_tracing
from lamina.verification import recording as _recording  # noqa: F401 -- records jobs that are compared
from lamina.verification import step_check as _step_check  # noqa: F401 -- compares first steps

try:
    __version__ = _metadata.version("lamina")
except _metadata.PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"

# The folder for CMAKE_PREFIX_PATH with which find_package(lamina) finds the headers and the engine.
cmake_prefix_path = str(
    next((each for each in map(_Path, __path__) if (each / "lib/cmake/lamina").is_dir()), __path__[0])
)

__all__ = [
    "DP_GROUP",
    "DP_RANK",
    "MP_GROUP",
    "MP_RANK",
    "PP_GROUP",
    "PP_RANK",
    "RDP_GROUP",
    "RDP_RANK",
    "TP_GROUP",
    "TP_RANK",
    "WORLD",
    "WORLD_RANK",
    "CancelledError",
    "CheckpointHandle",
    "CommGroup",
    "ConfigError",
    "DesyncError",
    "DistributedModel",
    "DistributedOptimizer",
    "Error",
    "FileError",
    "FormatError",
    "InternalError",
    "JsonLines",
    "Logger",
    "Metrics",
    "Microbatches",
    "PeerError",
    "RankType",
    "RemoteError",
    "Run",
    "StepOutput",
    "TensorBoard",
    "TimeoutError",
    "Trainer",
    "UsageError",
    "allgather",
    "barrier",
    "broadcast",
    "change",
    "checkpoint",
    "checkpoint_sequential",
    "cmake_prefix_path",
    "delay_param_initialization",
    "device",
    "dist",
    "distribute",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "gathered_parameters",
    "get_device_mesh",
    "get_dp_group",
    "get_dp_process_group",
    "get_full_gradient",
    "get_full_parameter",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "init",
    "is_initialized",
    "is_tracing",
    "launch",
    "load",
    "local_rank",
    "local_size",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "num_microbatches",
    "partition",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "remote",
    "resume_from_checkpoint",
    "rng_step",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_dynamic",
    "set_num_microbatches",
    "set_partition",
    "set_rng_seed",
    "set_rng_step",
    "set_tensor_parallelism",
    "shutdown",
    "size",
    "split_graph",
    "state",
    "step",
    "tensor_parallelism",
    "timeline",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
]

# Modules that `lamina run --preload lamina` imports too: torch's fake tensors, and so the first step, import it, and
# so does the first of torch's optimizers, in each rank.
__preload__ = ("torch._dynamo",)

# Packages that scripts name; all others are the inside.
_PACKAGES = ("amp", "callbacks", "dist", "nn", "optim", "optimizers", "remote", "state", "trainer")
_NOT_YET = {"CheckpointManager"}


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> object:
    if name in _NOT_YET:
        raise AttributeError(f"lamina.{name} is not available yet")
    places = [f"lamina.{place}.{name}" for place in _PACKAGES if name in getattr(globals()[place], "__all__", ())]
    places = places or [f"lamina.{near}" for near in _difflib.get_close_matches(name, __dir__(), 1)]
    raise AttributeError(f"lamina has no {name!r}" + (f"; there is {places[0]}" if places else ""))
