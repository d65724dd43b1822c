# SPDX-License-Identifier: Apache-2.0
"""Loading of checkpoints in the form of smdistributed.modelparallel: see [Note: smp form] in smp_files.py. Its files
are pickles, which may execute anything; those of a partial one are compared with their checksums before."""

import contextlib
import io
import os
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lamina import _lamina
from lamina.checkpoints import smp_files
from lamina.checkpoints.job_state import layout
from lamina.checkpoints.together import everywhere
from lamina.checkpoints.torch_files import read_torch_file
from lamina.errors import FormatError, UsageError
from lamina.integrations.replacements import module_manager
from lamina.job import current
from lamina.optim.optimizer_state import OptimizerState
from lamina.saved_state import archives
from lamina.saved_state.state_dicts import PARTIAL
from lamina.util.told import tell

_MANIFEST, _SUFFIX = "manifest.json", "_partial"
_TRAINERS = "pytorch_model.bin"


class _KeptPartition:
    """The partition of a checkpoint, which the model is to get: see Cut.resumption."""

    def __init__(self, partition: dict[str, int]):
        self.partition = partition

    def load(self) -> None:
        """Nothing is left to do at the cut: states wait for it where they are loaded."""


class PartialFolder:
    """A partial checkpoint in this form.

    Args:
        path: its folder.
        about: what its manifest says; None where it has none, since the original wrote it.
        verify: whether files are compared with their checksums.
    """

    def __init__(self, path: str, about: dict[str, Any] | None, verify: bool):
        self.path, self.about, self.verify = path, about, verify

    @property
    def is_foreign(self) -> bool:
        """True where the original wrote it."""
        return self.about is None

    def has(self, name: str) -> bool:
        """True where there is such a file, or should be one."""
        if self.is_foreign or not name.startswith("fp16_states"):
            return os.path.exists(os.path.join(self.path, name))
        return self.about["half_precision"]

    def file(self, name: str) -> str:
        """The path of a file that is as it was written."""
        if not self.is_foreign:
            return _lamina.checked_file(self.path, name, self.verify)
        path = os.path.join(self.path, name)
        if not os.path.isfile(path):
            raise FormatError(f"{path}: the checkpoint has no such file", code="state-damaged")
        if self.verify:
            archives.check(path, None, whole=True)
        return path

    def read(self, name: str) -> Any:
        """The object in a file; nothing in an empty one."""
        path = self.file(name)
        if os.path.getsize(path) == 0:
            return None
        is_mapped = archives.is_zip(path) and not name.startswith(smp_files.USER_CONTENT)
        try:
            return torch.load(path, map_location="cpu", weights_only=False, mmap=is_mapped)
        except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise FormatError(f"{path} cannot be loaded: {error}", code="state-damaged") from error

    def numbers(self, prefix: str) -> list[str]:
        """The numbers in the names of files: ["0_0_0", "0_0_1"] of optimizer_0_0_0.pt and optimizer_0_0_1.pt."""
        found = (re.fullmatch(rf"{prefix}_([0-9_]+)\.pt", name) for name in os.listdir(self.path))
        return sorted((each[1] for each in found if each), key=lambda each: [int(n) for n in each.split("_")])


def is_partial(reader: _lamina.CheckpointReader) -> bool:
    """True for a checkpoint in this form."""
    return reader.about("form", False) == smp_files.FORM


def of_reader(reader: _lamina.CheckpointReader, path: str, verify: bool) -> PartialFolder:
    """The checkpoint in this form that a manifest stands beside."""
    keys = ("layout", "partition", "optimizer", "half_precision", "divided")
    return PartialFolder(path, {key: reader.about(key, False) for key in keys}, verify)


def foreign_folder(path: str, tag: str | None) -> str | None:
    """The folder of the partial checkpoint that the original wrote and `path` and `tag` mean; None where they mean
    another one."""
    if tag is None:
        name, newest = "", os.path.join(path, "newest")
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if os.path.isfile(newest):  # a pipe would be waited for
                with open(newest, encoding="utf-8") as file:
                    name = os.path.basename(file.read(4096).strip())
    else:
        name = tag + _SUFFIX
    place = os.path.abspath(os.path.join(path, name))
    if not os.path.isdir(place) or os.path.exists(os.path.join(place, _MANIFEST)):
        return None
    return place if PartialFolder(place, None, False).numbers("model") else None


def meant_tag(path: str, tag: str | None) -> str | None:
    """The tag of a full checkpoint. Hugging Face's Trainer always says `pytorch_model.bin`: where it has written other
    files, their folder is meant."""
    written = tag != _TRAINERS or os.path.isfile(os.path.join(path, tag))
    return tag if written else None


def load_partial(job: current.Job, folder: PartialFolder, strict: bool, load_optimizer: bool, load_states: bool) -> Any:
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
        _require_layout(job, folder, load_optimizer)
        return _optimizer(job, folder) if load_optimizer else None

    def read() -> tuple[Mapping[str, Any], dict[str, Any], dict[str, Any], Any]:
        model = folder.read(smp_files.model_file(session))
        states, precision = {}, {}
        if optimizer is not None:
            states_file, precision_file = smp_files.optimizer_files(session)
            states = folder.read(states_file)
            if folder.has(precision_file):
                precision = folder.read(precision_file)
        content = folder.read(f"{smp_files.USER_CONTENT}.pt")
        if _is_sharded(job):
            model = model.get("module", model)
        if folder.is_foreign:
            masters = smp_files.own_masters(states, content, session)
            precision = ({"masters": masters} if masters else {}) | _known(precision)
            mark = {PARTIAL: True} if session.group_size("pp") > 1 else {}
            model = _with_parameters(job, folder, model, content) | mark
            states = _by_name(states)
        return model, states, precision, content

    optimizer = everywhere(job, find)
    model, states, precision, content = everywhere(job, read)
    if not job.model.partitioned:
        job.cut.resumption = _KeptPartition((folder.about or {}).get("partition") or {})
    _load_model(job, model, strict)
    if folder.is_foreign and optimizer is not None and not states and session.rank == 0:
        tell(f"{folder.path}: states of the optimizer that are not under the names of parameters are left")
    if optimizer is None:
        return content
    if states and (load_states or not _is_sharded(job)):
        everywhere(job, lambda: optimizer.load_state_dict(_of_optimizer(states) | precision))
    else:
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


def _require_layout(job: current.Job, folder: PartialFolder, load_optimizer: bool) -> None:
    """Each rank's files are those of a rank of the same place."""
    if folder.is_foreign:
        _require_files(job, folder, load_optimizer)
        return
    saved, here = folder.about["layout"], layout(job.session)
    axes = ["pp", "tp", "sharded_data_parallel_degree"]
    if load_optimizer and (folder.about["divided"] or smp_files.is_divided(job.session)):
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


def _require_files(job: current.Job, folder: PartialFolder, load_optimizer: bool) -> None:
    """The files that the original wrote are those that this job would have written."""
    session = job.session
    own = (smp_files.model_file(session), smp_files.optimizer_files(session)[0])
    models, optimizers = zip(*session.all_gather("world", own), strict=True)
    wanted = {"model": set(models)}
    if load_optimizer and job.optimizers:
        wanted["optimizer"] = set(optimizers)
    for prefix, names in wanted.items():
        found = {f"{prefix}_{each}.pt" for each in folder.numbers(prefix)}
        if found != names:
            raise UsageError(
                f"resume_from_checkpoint(): {folder.path} has {', '.join(sorted(found)) or f'no {prefix}_*.pt'}, and "
                f"this job's ranks would have {', '.join(sorted(names))}: take the layout that it was saved with, or "
                "make a checkpoint of it that any layout loads, by `lamina checkpoint convert`",
                code="state-other-ranks",
            )


def _optimizer(job: current.Job, folder: PartialFolder) -> OptimizerState | None:
    has = bool(folder.numbers("optimizer")) if folder.is_foreign else folder.about["optimizer"]
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


def _known(precision: Any) -> dict[str, Any]:
    """The masters that the original has beside its states, where they go by the names of parameters."""
    masters = precision.get("masters") if isinstance(precision, dict) else None
    is_named = isinstance(masters, dict) and all(isinstance(name, str) for name in masters)
    return {"masters": masters} if is_named else {}


def _by_name(states: Any) -> dict[str, Any]:
    """The states that the original wrote, where they go by the names of parameters; else none."""
    groups = states.get("param_groups") if isinstance(states, dict) else None
    if not groups or not isinstance(states.get("state"), dict):
        return {}
    is_named = all(isinstance(name, str) for group in groups for name in group["params"])
    return {**states, PARTIAL: True} if is_named else {}


def _with_parameters(job: current.Job, folder: PartialFolder, model: Mapping[str, Any], content: Any) -> dict[str, Any]:
    """The model's state; parameters that it has not the elements of are cut out of the optimizer's flat groups, and go
    by all names of tied ones."""
    named: dict[int, list[str]] = {}
    for name, parameter in job.model.module.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), []).append(name)
    also = {name: names for names in named.values() for name in names}

    def lacks(name: str, shape: torch.Size) -> bool:
        return name not in model or model[name].shape != shape

    shapes = smp_files.param_shapes(content)
    lacking = {name for group in shapes for name, shape in group.items() if lacks(name, shape)}
    if not lacking or not _is_sharded(job):
        return dict(model)
    parts = [folder.read(f"optimizer_{number}.pt") for number in folder.numbers("optimizer")]
    cut = smp_files.cut_out(parts, shapes, lacking)
    return {**model, **{other: value for name, value in cut.items() for other in also.get(name, [name])}}


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
