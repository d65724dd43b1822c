# SPDX-License-Identifier: Apache-2.0
"""Saving of checkpoints in the form of smdistributed.modelparallel: see [Note: smp form] in smp_files.py."""

import functools
import io
import itertools
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lamina import _lamina
from lamina.checkpoints import pickled_content, smp_files
from lamina.checkpoints.checkpointed_job import CheckpointedJob
from lamina.checkpoints.together import everywhere
from lamina.errors import FileError, UsageError, refusal, said
from lamina.job import current
from lamina.libraries.replacements import module_manager
from lamina.optim.optimizer_state import OptimizerState
from lamina.saved_state import archives
from lamina.util.files import first_os_error, replacing
from lamina.util.told import is_printable_line

_SLACK = 1 << 20  # bytes of a file beside its tensors


def save_partial(
    job: current.Job,
    path: str,
    tag: str,
    model: Any,
    optimizer: torch.optim.Optimizer | None,
    user_content: Any,
    kept: int,
) -> None:
    """Saves PATH/TAG_partial, with the commit of lamina's own checkpoints. Arguments and errors are those of
    `save_checkpoint`; of several optimizers one has to be given."""

    meant = CheckpointedJob(job, model, optimizer)
    _lamina.require_ready(job.session, meant)
    state = everywhere(job, lambda: _one(meant.states()))
    files = everywhere(job, lambda: _states(job, state))
    is_first = job.session.rank == 0
    content = everywhere(job, lambda: _pickled(_with_shapes(job, state, user_content)) if is_first else b"")
    if is_first:
        files[f"{pickled_content.NAME}.pt"] = content
    more = {
        "optimizer": state is not None,
        "half_precision": state is not None and state.has_precision(),
        "divided": smp_files.is_divided(job.session),
    } | smp_files.slices(job)
    to_write = [(name, _size(value), _writer(value)) for name, value in files.items()]
    _lamina.begin_save_of_files(job.session, meant, path, tag, smp_files.FORM, more, to_write, kept).wait()


def save_full(job: current.Job, path: str, tag: str, model: Any, user_content: Any, translate: bool) -> None:
    """Saves the whole model as PATH/TAG, and the content beside it. The first rank writes both, and has the whole
    model in memory. PATH/TAG has the content, too, so that no save that ends between the two mixes them."""
    if not is_printable_line(tag):
        raise refusal("no-tag", repr(tag))
    _lamina.require_ready(job.session, CheckpointedJob(job, model))
    state = job.model.state_dict(gather_to_rank0=True)
    is_first = job.session.rank == 0
    everywhere(job, lambda: _write_full(path, tag, state, user_content, translate) if is_first else None)


def _one(optimizers: list[OptimizerState]) -> OptimizerState | None:
    if len(optimizers) > 1:
        raise UsageError(
            f'save_checkpoint(form="smp"): there are {len(optimizers)} optimizers, and this form has one: say which, '
            'by optimizer=, or take form="lamina"',
            code="checkpoint-no-optimizer",
        )
    return optimizers[0] if optimizers else None


def _states(job: current.Job, optimizer: OptimizerState | None) -> dict[str, Any]:
    """The files of states that this rank writes; collective over the sharding group."""
    session, files = job.session, {}
    _require_plain_extra_states(job)
    sharded = smp_files.shards_of(session) > 1
    model = {"module": job.life.state().of_partition()} if sharded else job.model.local_state_dict()
    if smp_files.writes_model(session):
        files[smp_files.model_file(session)] = model
    if optimizer is None or not smp_files.writes_optimizer(session):
        return files
    state, precision = smp_files.apart(optimizer.local_state_dict(gather_if_shard=False))
    if sharded:
        merging = (smp_files.shards_of(session), smp_files.flat_groups(optimizer))
        state |= dict(zip(smp_files.FOR_MERGING, merging, strict=True))
    name, precision_name = smp_files.optimizer_files(session)
    files[name] = state
    if optimizer.has_precision():
        files[precision_name] = precision
    return files


def _require_plain_extra_states(job: current.Job) -> None:
    """Refuses what is not read again: nothing of these files is executed then."""
    for name, module in job.model.module.named_modules():
        has_own = type(module).get_extra_state is not torch.nn.Module.get_extra_state
        if not has_own or not job.partitioned_model.owns(name):
            continue
        state = module.get_extra_state()
        if not isinstance(state, torch.Tensor) and not _is_plain(state):
            raise UsageError(
                f'save_checkpoint(form="smp"): the extra state of {name or "the model"} is neither plain data nor a '
                'tensor, and files of this form are read as data: take form="lamina"',
                code="checkpoint-cannot-save",
            )


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, torch.Size):
        return all(map(_is_plain, value))
    if type(value) in (dict, OrderedDict):
        return all(map(_is_plain, itertools.chain(value.keys(), value.values())))
    return value is None or type(value) in (bool, int, float, str)


def _with_shapes(job: current.Job, optimizer: OptimizerState | None, content: Any) -> Any:
    """The content with what the merging of sharded files needs, where it does not have that itself."""
    is_sharded = smp_files.shards_of(job.session) > 1 and not (job.pipelined or job.sliced)
    if not is_sharded or not (content is None or isinstance(content, dict)):
        return content
    return {**smp_files.described(job, optimizer), **(content or {})}


def _pickled(content: Any) -> bytes:
    """UsageError for what cannot be pickled: before anything is written."""
    file = io.BytesIO()
    try:
        torch.save(content, file)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"save_checkpoint(): user_content cannot be pickled: {error}", code="checkpoint-refused"
        ) from error
    return file.getvalue()


def _writer(value: Any) -> Callable[[_lamina.OutputFile], None]:
    if isinstance(value, bytes):
        return lambda file: file.write(value) and None
    return functools.partial(_save_slices, value)


def _save_slices(value: Any, file: _lamina.OutputFile) -> None:
    """Writes what a rank has, of sliced parameters its slices."""
    with _lamina.Unguarded():
        torch.save(value, file)


def _size(value: Any) -> int:
    """About how many bytes a file takes."""
    if isinstance(value, bytes):
        return len(value)
    found = [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return _SLACK + sum(tensor.numel() * tensor.element_size() for tensor in found)


def _write_full(path: str, tag: str, state: Mapping[str, Any], user_content: Any, translate: bool) -> None:
    if translate:
        for to_hugging_face, _ in module_manager.translate_functions:
            state = to_hugging_face(state)
    content = _pickled(user_content)
    os.makedirs(path, exist_ok=True)
    needed, free = _size(dict(state)) + len(content), shutil.disk_usage(path).free
    if needed > free:
        raise UsageError(said("no-room", f"save_checkpoint(): {path}", needed, free), code="checkpoint-refused")
    name = os.path.join(path, tag)
    try:
        with replacing(name, 0) as file:
            torch.save(state, file)
            archives.attach(file, pickled_content.NAME, content)
        with replacing(pickled_content.beside(name), 0) as file:
            file.write(content)
    except (OSError, RuntimeError) as error:
        cause = first_os_error(error)
        if cause is None:
            raise
        refused = FileError(f"save_checkpoint(): writing {name}: {cause.strerror or cause}")
        refused.errno = cause.errno
        raise refused from error
