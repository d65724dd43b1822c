# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a whole job: model, optimizers, random generators and what the user adds, by all ranks together. See
[Note: job checkpoints] in lamina/job_checkpoint/save_job.h."""

import os
from typing import Any

import torch

from lamina import _lamina
from lamina.checkpoints import smp_files, smp_saving
from lamina.checkpoints.checkpointed_job import CheckpointedJob
from lamina.errors import UsageError
from lamina.job import current
from lamina.job.arguments import require_same
from lamina.util.checks import require_booleans, require_count, require_local


class CheckpointHandle:
    """A checkpoint that is being saved while training goes on."""

    def __init__(self, save: _lamina.Save):
        self._save = save

    def done(self) -> bool:
        """True when it has ended, well or not."""
        return self._save.is_over

    def wait(self) -> None:
        """Returns when the checkpoint is on the disk; raises what kept it from getting there, on every rank."""
        self._save.wait()


def save_checkpoint(
    path: str | os.PathLike,
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    *,
    asynchronous: bool = False,
    allow_pickle: bool = False,
    form: str | None = None,
) -> CheckpointHandle | None:
    """Saves model, optimizers, loss scale and random generators of the job as the checkpoint `path/tag_partial`.
    Every rank calls it, between steps. The checkpoint is there, whole and on the disk, or what was there before is.

    Hugging Face's `from_pretrained` loads a model from it, too, if that is not sharded.

    Args:
        path: the folder of the checkpoints; the same one for all ranks, on all machines.
        tag: names the checkpoint; one of the same name is replaced.
        partial: with False only the model is saved, and each tensor as a whole, as the folder `path`/`tag`: one that
            Hugging Face's libraries load.
        model, optimizer: the job's; they may be left out.
        user_content: what is to be saved besides: numbers, strings, tensors, NumPy's arrays, containers of those, state
            dicts of schedulers. Rank 0's is saved.
        translate_if_full: with `partial=False`: names become Hugging Face's where they are others here, which they are
            where lamina has put modules of its own into the places of Hugging Face's.
        num_kept_partial_checkpoints: so many checkpoints of this folder stay, the latest ones; None: all.
        asynchronous: returns when the ranks have copied what they save, and writes while training goes on. The next
            save, the handle's `wait()`, or the end of the job waits for it; an error is raised there, or before the
            next step of a step function, the same one on every rank.
        allow_pickle: whether objects of other classes may be pickled, which then is to be said where they are loaded.
        form: "lamina", the default, or "smp": files of torch.save as scripts for smdistributed.modelparallel read them,
            `path/tag_partial`, or with `partial=False` the file `path`/`tag`. In that form user_content is anything
            that can be pickled, and there is no `asynchronous`.

    Returns:
        A handle where it is asynchronous.

    Errors:
        UsageError: before the model is partitioned, inside a step function, between the backward passes of one
        reduction. Also while another save of the same tag is under way, and for a folder that some rank does not see or
        that has no room.
        FileError: the file system refuses; it says path and cause. PeerError, TimeoutError: a rank is lost, or makes no
        progress.
    """
    job = current.outside_step("save_checkpoint()")
    require_same(
        job.session,
        "world",
        "save_checkpoint()",
        code="checkpoint-refused",
        path=path,
        tag=tag,
        partial=partial,
        form=form,
        optimizer=_which(job, optimizer),
        translate_if_full=translate_if_full,
        num_kept_partial_checkpoints=num_kept_partial_checkpoints,
        asynchronous=asynchronous,
        allow_pickle=allow_pickle,
    )
    if not isinstance(tag, str):
        raise UsageError(f"save_checkpoint(): a tag is a string, not {type(tag).__name__}")
    require_booleans(
        partial=partial, translate_if_full=translate_if_full, asynchronous=asynchronous, allow_pickle=allow_pickle
    )
    require_local(path=path)
    if num_kept_partial_checkpoints is not None:
        require_count(num_kept_partial_checkpoints=num_kept_partial_checkpoints)
    if form not in (None, "lamina", smp_files.FORM):
        raise UsageError(f'save_checkpoint(): form is "lamina" or "{smp_files.FORM}", not {form!r}')
    if form == smp_files.FORM and asynchronous:
        raise UsageError('save_checkpoint(form="smp") is written while training waits: leave asynchronous out')
    kept = num_kept_partial_checkpoints or 0
    if form == smp_files.FORM:
        job.saves.end()
        if partial:
            smp_saving.save_partial(job, os.fspath(path), tag, model, optimizer, user_content, kept)
        else:
            smp_saving.save_full(job, os.fspath(path), tag, model, user_content, translate_if_full)
        return None
    save = _lamina.save_job(
        job.session,
        CheckpointedJob(job, model, optimizer, user_content),
        job.saves,
        folder=os.fspath(path),
        tag=tag,
        partial=partial,
        keep=kept,
        asynchronous=asynchronous,
        allow_objects=allow_pickle,
    )
    return CheckpointHandle(save) if asynchronous else None


def _which(job: current.Job, optimizer: torch.optim.Optimizer | None) -> str:
    """Names the optimizers that are meant, by their numbers: those of other ranks are other objects."""
    if optimizer is not None and job.state_of(optimizer) is None:
        return "none of the job's"
    numbers = (str(number) for number, known in enumerate(job.optimizers) if optimizer in (None, known.optimizer))
    return f"number {', '.join(numbers)}"
