# SPDX-License-Identifier: Apache-2.0
"""Loading of whole models that `torch.save` has written, in the form of smdistributed.modelparallel: see [Note: smp
form] in smp_files.py. Partial ones the engine reads."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from lamina.checkpoints import pickled_content
from lamina.checkpoints.together import everywhere
from lamina.checkpoints.torch_files import read_torch_file
from lamina.job import current
from lamina.libraries.replacements import module_manager
from lamina.saved_state import archives
from lamina.util.told import tell

_TRAINERS = "pytorch_model.bin"


def meant_tag(path: str, tag: str | None) -> str | None:
    """The tag of a full checkpoint. Hugging Face's Trainer always says `pytorch_model.bin`: where it has written other
    files, their folder is meant."""
    written = tag != _TRAINERS or os.path.isfile(os.path.join(path, tag))
    return tag if written else None


def load_full(
    job: current.Job, file: str, strict: bool, translate: Callable[[Any], Any] | None, pickles: tuple[bool, bool]
) -> Any:
    """Loads a file of tensors, a whole model's state dict, into any layout; of the optimizer nothing.

    Args:
        pickles: whether files are compared with their checksums, and whether the content may have objects of any class.

    Returns:
        The user_content; None where there is none.

    Errors:
        UsageError: names or shapes do not fit. FormatError: a file is damaged.
    """

    def read() -> tuple[Mapping[str, Any], Any]:
        if pickles[0]:
            archives.check(file, None, whole=True)
        return _translated(job, read_torch_file(file), translate), _content(file, *pickles)

    state, content = everywhere(job, read)
    job.life.resumption = None
    _load_model(job, state, strict)
    return content


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
    return module_manager.in_own_names(state, own)


def _content(file: str, verify: bool, allow_pickle: bool) -> Any:
    record = archives.attached(file, pickled_content.NAME)
    if record is not None:
        return pickled_content.made(record, file, allow_pickle)
    return pickled_content.read(pickled_content.beside(file), verify, allow_pickle)
