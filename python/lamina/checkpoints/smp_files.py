# SPDX-License-Identifier: Apache-2.0
"""Names and contents of the files of checkpoints in the form of smdistributed.modelparallel.

[Note: smp form] A partial checkpoint is the folder PATH/TAG_partial of files of torch.save:

    model_N.pt         what a partition owns, as a partial state dict; N is its mp_rank (with slices PP_TP, and of what
                       is sliced that slice). Where parameters are sharded the state of the whole parameters, or slices,
                       is beneath "module"
    optimizer_N.pt     the optimizer's partial state dict, without masters. Where states are divided over the copies of
                       a model, each of those has one, PP_TP_RDP; where parameters are sharded, those of one sharding
                       group, which have `partition_count` and `fp32_flat_groups`, too: see `flat_groups`
    fp16_states_N.pt   beside each of them, with the configuration fp16 or bf16: its masters and the loss scale
    user_content.pt    the user's content, and where parameters are sharded `buffer_names` and `param_shapes`
    manifest.json      lamina's own: the layout, the partition, how parameters are sliced, sizes and checksums of the
                       files

A full one is the file PATH/TAG, the whole model's state dict, and the file PATH/user_content_TAG.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from lamina import _lamina
from lamina.job import current
from lamina.optim.optimizer_state import OptimizerState
from lamina.tensor_parallel import layers

FORM = "smp"
FOR_MERGING = ("partition_count", "fp32_flat_groups")  # in the optimizer's file
_PRECISION = ("masters", "loss_scale")  # of an optimizer's state, in fp16_states


def model_file(session: _lamina.Session) -> str:
    """The name of the file with this rank's part of the model."""
    return f"model_{_partition(session)}.pt"


def optimizer_files(session: _lamina.Session) -> tuple[str, str]:
    """The names of the files with this rank's part of the optimizer: states, and what half precision adds."""
    number = _partition(session)
    if shards_of(session) > 1:
        number = f"{session.group_rank('pp')}_{session.group_rank('tp')}_{session.group_rank('shard')}"
    elif is_divided(session):
        number = f"{session.group_rank('pp')}_{session.group_rank('tp')}_{session.group_rank('rdp')}"
    return f"optimizer_{number}.pt", f"fp16_states_{number}.pt"


def shards_of(session: _lamina.Session) -> int:
    """How many shards there are of a parameter."""
    return session.group_size("shard")


def is_divided(session: _lamina.Session) -> bool:
    """True where the copies of a model have parts of the optimizer's states."""
    return session.config.shard_optimizer_state and session.group_size("rdp") > 1


def writes_model(session: _lamina.Session) -> bool:
    """True where this rank is the one that writes its part of the model: the first that has it."""
    return session.group_rank("rdp") == 0


def writes_optimizer(session: _lamina.Session) -> bool:
    """True where this rank is the one that writes its part of the optimizer."""
    return is_divided(session) or session.group_rank("rdp") < shards_of(session)


def slices(job: current.Job) -> dict[str, Any]:
    """Says for the manifest how parameters are sliced: by name the dimension, and (extent, unit) of its sections."""
    slicings = layers.slicings(job.model.module)
    named = job.model.module.named_parameters(remove_duplicate=False)
    own = {name: slicings[id(parameter)] for name, parameter in named if id(parameter) in slicings}
    cuts = {name: [cut, [list(section) for section in sections]] for name, (cut, sections) in own.items()}
    return {"slices": cuts} if cuts else {}


def apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An optimizer's partial state, and apart from it what half precision adds."""
    rest = {key: value for key, value in state.items() if key not in _PRECISION}
    return rest, {key: state[key] for key in _PRECISION if key in state}


def flat_groups(optimizer: OptimizerState) -> list[torch.Tensor]:
    """Per group a tensor of one dimension, float32: of each parameter in the order of `fp16_groups` this rank's
    ceil(n / shards) elements, the last of which are 0 where there are no more."""
    return [flat.float() for flat in optimizer.optimizer.fp32_partitioned_groups_flat]


def described(job: current.Job, optimizer: OptimizerState | None) -> dict[str, Any]:
    """Says what the merging of sharded files needs to know: `buffer_names`, and `param_shapes` of each group of the
    flat ones, by name."""
    module = job.model.module
    buffers = [
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [] if optimizer is None else optimizer.optimizer.fp16_groups
    shapes = [OrderedDict((names[id(each)], each.shape) for each in group if id(each) in names) for group in groups]
    return {"buffer_names": buffers, "param_shapes": shapes}


def _partition(session: _lamina.Session) -> str:
    if session.group_size("tp") > 1:
        return f"{session.group_rank('pp')}_{session.group_rank('tp')}"
    return str(session.group_rank("mp"))
