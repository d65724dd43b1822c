# SPDX-License-Identifier: Apache-2.0
"""Loading of checkpoints in the form of smdistributed.modelparallel: see [Note: smp form] in smp_files.py. Its files
are pickles, which may execute anything; those of a partial one are compared with their checksums before."""

import io
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lamina import _lamina
from lamina.checkpoints import smp_files
from lamina.checkpoints.job_state import layout
from lamina.checkpoints.together import everywhere, tell
from lamina.checkpoints.torch_files import read_torch_file
from lamina.errors import FormatError, UsageError
from lamina.integrations.replacements import module_manager
from lamina.job import current
from lamina.optim.optimizer_state import OptimizerState
from lamina.saved_state import archives

Reader = _lamina.CheckpointReader
_TRAINERS = "pytorch_model.bin"


class _KeptPartition:
    """The partition of a checkpoint, which the model is to get: see Cut.resumption."""

    def __init__(self, partition: dict[str, int]):
        self.partition = partition

    def load(self) -> None:
        """Nothing is left to do at the cut: states wait for it where they are loaded."""


def is_partial(reader: Reader) -> bool:
    """True for a checkpoint in this form."""
    return reader.about("form", False) == smp_files.FORM


def meant_tag(path: str, tag: str | None) -> str | None:
    """The tag of a full checkpoint. Hugging Face's Trainer always says `pytorch_model.bin`: where it has written other
    files, their folder is meant."""
    written = tag != _TRAINERS or os.path.isfile(os.path.join(path, tag))
    return tag if written else None


def load_partial(
    job: current.Job,
    reader: Reader,
    folder: str,
    strict: bool,
    load_optimizer: bool,
    load_states: bool,
    verify: bool,
) -> Any:
    """Loads PATH/TAG_partial into a job of the same layout; each rank reads its own files.

    Args:
        load_states: whether the optimizer's states of sharded parameters are loaded, and not only their masters.

    Returns:
        The user_content.

    Errors:
        UsageError: the layout is another one, or something does not fit. FormatError: a file is damaged.
    """
    session = job.session

    def find() -> OptimizerState | None:
        _require_layout(job, reader, load_optimizer)
        return _optimizer(job, reader) if load_optimizer else None

    def read() -> tuple[Mapping[str, Any], dict[str, Any], dict[str, Any], Any]:
        model = _read(folder, smp_files.model_file(session), verify)
        states, precision = {}, {}
        if optimizer is not None:
            states_file, precision_file = smp_files.optimizer_files(session)
            states = _read(folder, states_file, verify)
            if reader.about("half_precision", False):
                precision = _read(folder, precision_file, verify)
        content = _read(folder, f"{smp_files.USER_CONTENT}.pt", verify)
        return model.get("module", model) if _is_sharded(job) else model, states, precision, content

    optimizer = everywhere(job, find)
    model, states, precision, content = everywhere(job, read)
    if not job.model.partitioned:
        job.cut.resumption = _KeptPartition(reader.about("partition", False) or {})
    _load_model(job, model, strict)
    if optimizer is not None and (load_states or not _is_sharded(job)):
        everywhere(job, lambda: optimizer.load_state_dict(_of_optimizer(states) | precision))
    elif optimizer is not None:
        everywhere(job, lambda: optimizer.load_precision(precision))
    return content


def load_full(job: current.Job, file: str, strict: bool, translate: Callable[[Any], Any] | None, verify: bool) -> Any:
    """Loads a file of tensors, a whole model's state dict, into any layout; of the optimizer nothing.

    Returns:
        The user_content; None where there is none.

    Errors:
        UsageError: names or shapes do not fit. FormatError: a file is damaged.
    """

    def read() -> tuple[Mapping[str, Any], Any]:
        if verify:
            archives.check(file, None, whole=True)
        return _translated(job, read_torch_file(file), translate), _full_content(file)

    state, content = everywhere(job, read)
    _load_model(job, state, strict)
    return content


def _is_sharded(job: current.Job) -> bool:
    return smp_files.shards_of(job.session) > 1


def _require_layout(job: current.Job, reader: Reader, load_optimizer: bool) -> None:
    """Each rank's files are those of a rank of the same place."""
    saved, here = reader.about("layout", False), layout(job.session)
    axes = ["pp", "tp", "sharded_data_parallel_degree"]
    if load_optimizer and (reader.about("divided", False) or smp_files.is_divided(job.session)):
        axes.append("rdp")
    if all(saved[axis] == here[axis] for axis in axes):
        return
    counts = (" x ".join(f"{axis} {each[axis]}" for axis in axes) for each in (saved, here))
    raise UsageError(
        "resume_from_checkpoint(): a partial checkpoint of this form was saved by {}, and this job is {}: take the "
        'layout that it was saved with, save a full one (partial=False), or in lamina\'s own form (form="lamina"), '
        "which any layout loads".format(*counts),
        code="state-other-ranks",
    )


def _optimizer(job: current.Job, reader: Reader) -> OptimizerState | None:
    has = reader.about("optimizer", False)
    if has and len(job.optimizers) == 1:
        return job.optimizers[0]
    if not has and not job.optimizers:
        return None
    raise UsageError(
        f"resume_from_checkpoint(): the checkpoint has {'one optimizer' if has else 'no optimizer'}, and there are "
        f"{len(job.optimizers)} here: make it before, or give load_optimizer=False",
        code="checkpoint-optimizers",
    )


def _of_optimizer(states: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is there for the merging of files."""
    return {key: value for key, value in states.items() if key not in smp_files.FOR_MERGING}


def _read(folder: str, name: str, verify: bool) -> Any:
    path = _lamina.checked_file(folder, name, verify)
    try:
        return torch.load(
            path, map_location="cpu", weights_only=False, mmap=not name.startswith(smp_files.USER_CONTENT)
        )
    except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise FormatError(f"{path} cannot be loaded: {error}", code="state-damaged") from error


def _load_model(job: current.Job, state: Mapping[str, Any], strict: bool) -> None:
    loaded = everywhere(job, lambda: job.model.load_state_dict(state, strict=strict))
    if job.session.rank == 0 and (loaded.missing_keys or loaded.unexpected_keys):
        tell(
            f"resume_from_checkpoint(strict=False) left out: missing {loaded.missing_keys}, "
            f"unexpected {loaded.unexpected_keys}"
        )


def _translated(
    job: current.Job, state: Mapping[str, Any], translate: Callable[[Any], Any] | None
) -> Mapping[str, Any]:
    """The state with the names that the model has here: as it is where they fit."""
    if translate is not None:
        return translate(state)
    own = {name for name, _ in job.model.module.named_parameters(remove_duplicate=False)}
    for _, from_hugging_face in module_manager.translate_functions:
        if not own <= state.keys():
            state = from_hugging_face(state)
    return state


def _full_content(file: str) -> Any:
    record = archives.attached(file, smp_files.USER_CONTENT)
    if record is not None:
        return torch.load(io.BytesIO(record), map_location="cpu", weights_only=False)
    beside = smp_files.user_content_beside(*os.path.split(file))
    if not os.path.isfile(beside) or os.path.getsize(beside) == 0:
        return None
    return torch.load(beside, map_location="cpu", weights_only=False)
