# SPDX-License-Identifier: Apache-2.0
"""Loading of checkpoints: see [Note: job checkpoints] in lamina/job_checkpoint/save_job.h."""

import os
from collections.abc import Callable
from typing import Any

from lamina import _lamina
from lamina.checkpoints import smp_loading
from lamina.checkpoints.checkpointed_job import CheckpointedJob
from lamina.checkpoints.together import everywhere
from lamina.checkpoints.torch_files import torch_file
from lamina.job import current
from lamina.job.arguments import require_same
from lamina.util.checks import require_booleans, require_local


def resume_from_checkpoint(
    path: str | os.PathLike,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable | None = None,
    *,
    verify: bool = True,
    allow_pickle: bool = False,
    missing_ok: bool = False,
) -> Any:
    """Loads what `save_checkpoint` has saved, in this layout or any other one. Every rank calls it, when model and
    optimizer are made; before the model is partitioned what is loaded waits for that, and the partition is the saved
    one where the number of partitions is. Nothing is changed on any rank unless all of it fits on all.

    With the layout of the checkpoint the training goes on as if it had never ended: random generators and the loss
    scale go on, too.

    Args:
        path: the folder of the checkpoints.
        tag: which one; None for the newest. Where the newest is damaged, a warning says so, and the latest that is
            whole is taken.
        strict: whether the names of parameters and buffers have to be the same; what is left out is told otherwise.
        load_optimizer: whether states of optimizers, masters and the loss scale are loaded.
        load_sharded_optimizer_state: with False, where parameters are sharded, masters and the loss scale alone.
        partial: with False a whole model. It was saved so, or is a folder of Hugging Face's (`model.safetensors`, or
            several and their index), or a `pytorch_model.bin`, which is read without executing anything. It is the
            folder `path`/`tag`, or `path` itself. States of optimizers stay as they are.
        translate_function: with `partial=False`: makes a state dict with the model's names of the one that is read,
            which each rank then has as a whole.
        verify: whether all that is read is compared with the checksums.
        allow_pickle: whether objects of user_content, and of extra states of modules, that were pickled are made; that
            may execute anything. Nothing else is unpickled, whoever wrote it.
        missing_ok: whether nothing is loaded where there is no such checkpoint, which a line says; for a script that
            goes on from the last checkpoint if there is one.

    Returns:
        The user_content that was saved, or None where nothing was loaded.

    Errors:
        UsageError: there is no such checkpoint, names, shapes or groups that do not fit, inside a step function.
        FormatError: it is damaged; the file and the tensor are named. FileError: it cannot be read.
    """
    job = current.outside_step("resume_from_checkpoint()")
    flags = {
        "partial": partial,
        "strict": strict,
        "load_optimizer": load_optimizer,
        "load_sharded_optimizer_state": load_sharded_optimizer_state,
        "verify": verify,
        "allow_pickle": allow_pickle,
        "missing_ok": missing_ok,
    }
    require_same(
        job.session,
        "world",
        "resume_from_checkpoint()",
        code="checkpoint-refused",
        path=path,
        tag=tag,
        translate_function=translate_function,
        **flags,
    )
    require_booleans(**flags)
    require_local(path=path, tag=tag)
    _lamina.require_model(job.has_model, "resume_from_checkpoint()")
    job.saves.end()
    if not partial:
        tag = everywhere(job, lambda: smp_loading.meant_tag(path, tag), gathered=True)[0]
        place = os.path.join(path, tag) if tag else os.fspath(path)
        if file := everywhere(job, lambda: torch_file(place), gathered=True)[0]:
            return smp_loading.load_full(job, file, strict, translate_function, (verify, allow_pickle))
    loaded = CheckpointedJob(job, translate=translate_function, strict=strict, pickles=(verify, allow_pickle))
    _lamina.resume_job(
        job.session,
        loaded,
        job.saves,
        folder=os.fspath(path),
        tag=tag,
        translate=translate_function is not None and not partial,
        **{("allow_objects" if name == "allow_pickle" else name): flag for name, flag in flags.items()},
    )
    return loaded.content
