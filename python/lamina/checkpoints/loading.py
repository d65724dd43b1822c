# SPDX-License-Identifier: Apache-2.0
"""Loading of checkpoints: see [Note: checkpoints] in saving.py."""

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina._lamina import SavedKind
from lamina.checkpoints import generators, smp_loading, states
from lamina.checkpoints.job_state import layout, persistent
from lamina.checkpoints.plain import from_plain
from lamina.checkpoints.saving import of_job
from lamina.checkpoints.together import everywhere
from lamina.checkpoints.torch_files import torch_file
from lamina.errors import FileError, FormatError, UsageError
from lamina.job import current
from lamina.job.arguments import require_same
from lamina.model import shards
from lamina.model.partitioned import PartitionedModel
from lamina.optim.functional import class_name
from lamina.optim.optimizer_state import OptimizerState
from lamina.util.checks import require_booleans, require_no_nul
from lamina.util.told import tell

_OF_MODEL = (SavedKind.PARAMETER, SavedKind.BUFFER)


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
        load_sharded_optimizer_state: with False as `load_optimizer=False` where parameters are sharded.
        partial: with False a whole model. It was saved so, or is a folder of Hugging Face's (`model.safetensors`, or
            several and their index), or a `pytorch_model.bin`, which is read without executing anything. It is the
            folder `path`/`tag`, or `path` itself. States of optimizers stay as they are.
        translate_function: with `partial=False`: makes a state dict with the model's names of the one that is read,
            which each rank then has as a whole.
        verify: whether all that is read is compared with the checksums.
        allow_pickle: whether objects of user_content, and of extra states of modules, that were pickled are made; that
            may execute anything.

    Returns:
        The user_content that was saved.

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
    require_no_nul(path=path, tag=tag)
    if job.model is None:
        raise UsageError(
            "resume_from_checkpoint(): there is no DistributedModel yet: make model and optimizer first, then load",
            code="checkpoint-no-model",
        )
    of_job(job).end()
    if not partial:
        tag = everywhere(job, lambda: smp_loading.meant_tag(path, tag), gathered=True)[0]
        place = os.path.join(path, tag) if tag else os.fspath(path)
        if file := everywhere(job, lambda: torch_file(place), gathered=True)[0]:
            return smp_loading.load_full(job, file, strict, translate_function, verify)
    foreign = lambda: smp_loading.foreign_folder(os.fspath(path), tag) if partial else None  # noqa: E731
    if found := everywhere(job, foreign, gathered=True)[0]:
        what = (strict, load_optimizer, load_sharded_optimizer_state)
        return smp_loading.load_partial(job, smp_loading.PartialFolder(found, None, verify), *what)

    def load(reader: _lamina.CheckpointReader, folder: str) -> Any:
        if partial and smp_loading.is_partial(reader):
            what = (strict, load_optimizer, load_sharded_optimizer_state)
            return smp_loading.load_partial(job, smp_loading.of_reader(reader, folder, verify), *what)
        whole_states = load_sharded_optimizer_state or job.session.group_size("shard") == 1
        resumption = Resumption(job, reader, strict, partial and load_optimizer and whole_states, allow_pickle)
        return _load_job(resumption) if partial else _load_model(resumption, translate_function, strict)

    return _load_newest_whole(job, os.fspath(path), tag, verify, partial, load)


def _load_job(resumption: "Resumption") -> Any:
    content = everywhere(resumption.job, resumption.content)
    everywhere(resumption.job, resumption.read_generators)
    resumption.begin()
    everywhere(resumption.job, resumption.go_on)
    return content


def _load_model(resumption: "Resumption", translate: Callable | None, strict: bool) -> Any:
    job, reader = resumption.job, resumption.reader
    content = everywhere(job, resumption.content)
    if job.optimizers and job.session.rank == 0:
        tell("a whole model has no states of optimizers: those of this job stay as they are")
    if translate is None:
        resumption.begin()
    else:
        _load_state(job, everywhere(job, lambda: _whole(reader)), translate, strict)
    return content


def _load_newest_whole(
    job: current.Job,
    path: str,
    tag: str | None,
    verify: bool,
    partial: bool,
    load: Callable[[_lamina.CheckpointReader, str], Any],
) -> Any:
    """Loads the checkpoint of a tag, or with None the newest that is not damaged; returns what `load` does."""
    chosen = tag
    while True:
        reader, folder, found = _open(job, path, chosen, verify, partial)
        try:
            return load(reader, folder)
        except (FormatError, FileError) as error:
            chosen = _before(job, path, found) if partial else ""
            if not chosen or (tag is not None and isinstance(error, FileError)):
                raise
            if tag is not None:
                raise FormatError(f"{error}; the latest whole one before it is {chosen!r}") from None
            if job.session.rank == 0:
                tell(f"{error}: the latest whole one before it, {chosen!r}, is taken")


def _before(job: current.Job, path: str, tag: str) -> str:
    """The tag of the latest whole checkpoint before that one; "" where there is none."""
    find = lambda: _lamina.checkpoint_before(path, tag) if job.session.rank == 0 else ""  # noqa: E731
    return everywhere(job, find, gathered=True)[0]


def _whole(reader: _lamina.CheckpointReader) -> dict[str, torch.Tensor]:
    """The model's tensors on this rank."""
    return {name: reader.whole(name) for name, kind, _, _ in reader.tensors if kind in _OF_MODEL}


def _load_state(job: current.Job, state: dict[str, torch.Tensor], translate: Callable | None, strict: bool) -> None:
    job.model.load_state_dict(state if translate is None else translate(state), strict)


def _open(
    job: current.Job, path: str, tag: str | None, verify: bool, partial: bool
) -> tuple[_lamina.CheckpointReader, str, str]:
    """The checkpoint that world rank 0 finds, its folder and its tag, on every rank."""

    def find() -> tuple[str, str, str] | None:
        # Others may have another working directory.
        return _lamina.find_checkpoint(os.path.abspath(path), tag, partial, tell) if job.session.rank == 0 else None

    found = everywhere(job, find, gathered=True)[0]
    if found is None:
        raise UsageError(
            f"resume_from_checkpoint(): there is no checkpoint in {path}: give the folder that save_checkpoint() got",
            code="checkpoint-not-there",
        )
    folder, name, found_tag = found

    def read() -> _lamina.CheckpointReader:
        reader = _lamina.CheckpointReader(folder, verify)
        if reader.id != name:
            raise FormatError(f"{folder}: another checkpoint has taken this one's place meanwhile: load again")
        return reader

    return everywhere(job, read), folder, found_tag


class Resumption:
    """A checkpoint that is loaded into a job: at once, or when its model is cut.

    Args:
        job: has a model.
        reader: of the checkpoint.
        strict, load_optimizer, allow_pickle: as `resume_from_checkpoint` has them.
    """

    def __init__(
        self,
        job: current.Job,
        reader: _lamina.CheckpointReader,
        strict: bool,
        load_optimizer: bool,
        allow_pickle: bool,
    ):
        self.job, self.reader = job, reader
        self._extra_states: dict[str, Any] = {}
        self._generators: dict[str, Any] | None = None
        self._allow_pickle = allow_pickle
        self._strict, self._load_optimizer = strict, load_optimizer

    @property
    def partition(self) -> dict[str, int]:
        """The partition of each module, where the job has as many partitions as the saved one; else {}."""
        saved = self.reader.about("layout", False) or {}
        return (
            self.reader.about("partition", False) or {} if saved.get("pp") == self.job.session.group_size("pp") else {}
        )

    def content(self) -> Any:
        """The user_content that was saved."""
        return from_plain(self.reader.about("user_content", self._allow_pickle))

    def read_generators(self) -> None:
        """Reads where generators go on, in the layout of the checkpoint alone: before anything is changed."""
        job, reader = self.job, self.reader
        if reader.about("layout", False) != layout(job.session):
            return
        own = reader.want_content(f"generator/{job.session.rank}")
        reader.read(job.session)
        rest = from_plain(reader.about("generators", False)[job.session.rank])
        self._generators = {"torch": own, **rest}

    def begin(self) -> None:
        """Loads it into a model that is cut, or has it wait for the cut; collective over the world."""
        if self.job.model.partitioned:
            self.load()
            return
        # Damage is found here, where another one can be taken.
        everywhere(self.job, lambda: self.reader.check_share(self.job.session))
        everywhere(self.job, self.check)
        self.job.cut.resumption = self

    def check(self) -> None:
        """UsageError where the checkpoint does not fit the model and the optimizers."""
        left_out = self.reader.check_model(self._named(), self._strict)
        if left_out and self.job.session.rank == 0:
            tell(left_out)
        self._extra_states = from_plain(self.reader.about("extra_state", self._allow_pickle) or {})
        if self._load_optimizer:
            self._check_optimizers()

    def _named(self) -> list[tuple[list[str], torch.Tensor]]:
        """Each tensor of the model's state, with its names."""
        by_tensor: dict[int, tuple[list[str], torch.Tensor]] = {}
        for name, tensor in persistent(self.job.model.module):
            by_tensor.setdefault(id(tensor), ([], tensor))[0].append(name)
        return list(by_tensor.values())

    def _check_optimizers(self) -> None:
        saved, here = self._about_optimizers, self.job.optimizers
        if len(saved) != len(here):
            raise UsageError(
                f"the checkpoint has the states of {len(saved)} optimizers, and there are {len(here)} here: make them "
                "before resume_from_checkpoint(), or give load_optimizer=False",
                code="checkpoint-optimizers",
            )
        for number, (about, optimizer) in enumerate(zip(saved, here, strict=True)):
            groups = optimizer.optimizer.param_groups
            own, theirs = class_name(optimizer.optimizer), about.get("class")
            if self._strict and theirs not in (None, own, type(optimizer.optimizer).__name__):
                raise UsageError(
                    f"optimizer {number} is of the class {own} here and {theirs} in the checkpoint: make one of that "
                    "class, or give strict=False, where the states are alike, or load_optimizer=False",
                    code="checkpoint-optimizers",
                )
            if len(about["groups"]) != len(groups):
                raise UsageError(
                    f"optimizer {number} has {len(groups)} parameter groups here and {len(about['groups'])} in the "
                    "checkpoint",
                    code="checkpoint-optimizers",
                )
            for place, (group, known) in enumerate(zip(about["groups"], optimizer.known(), strict=True)):
                if lacking := _lacking(optimizer.optimizer, group):
                    raise UsageError(
                        f"group {place} of optimizer {number} has no {', '.join(lacking)} in the checkpoint, which "
                        f"{type(optimizer.optimizer).__name__} needs: make one of the class that was saved, or give "
                        "load_optimizer=False",
                        code="checkpoint-optimizers",
                    )
                mine, theirs = {name for name, _ in known}, set(group["params"])
                if self._strict and mine != theirs:
                    raise UsageError(
                        f"group {place} of optimizer {number} has other parameters than in the checkpoint: "
                        f"{sorted(mine ^ theirs)[:5]}",
                        code="checkpoint-optimizers",
                    )

    @functools.cached_property
    def _about_optimizers(self) -> list[dict[str, Any]]:
        return from_plain(self.reader.about("optimizers", False) or [])

    def load(self) -> None:
        """Loads it, into a model that is cut; collective over the world."""
        job, reader = self.job, self.reader
        model = job.cut.model
        job.cut.make_again()
        plan = everywhere(job, lambda: self._planned(model))
        everywhere(job, lambda: reader.read(job.session))  # [Note: two reads]
        sharding = model.sharding
        if sharding is not None:
            sharding.before_update()
        everywhere(job, lambda: reader.fill_model(job.session))
        if sharding is not None:
            sharding.after_update()
        for optimizer in job.optimizers:
            optimizer.follow()
        everywhere(job, lambda: reader.fill_optimizers(job.session))
        plan.load()

    def _planned(self, model: PartitionedModel) -> "_Plan":
        self.check()
        plan = _Plan(model, {name: self._extra(name, value) for name, value in self._extra_states.items()})
        names = {id(tensor): names for names, tensor in self._named()}
        parts = _lamina.CheckpointParts(self.job.session, model.table)
        for name, tensor, owner in model.tensors():
            if owner != model.partition or id(tensor) not in names:
                continue
            if (saved := self.reader.saved_name(names[id(tensor)])) is None:
                continue
            kind, optimizer = self.reader.best_source(saved, tensor.dtype)
            if saved != name:
                raise UsageError(
                    f"{name} is tied, and saved as {saved}, which is another tensor here", code="checkpoint-names"
                )
            self.reader.want_row(parts, name, kind, optimizer, shards.holder(tensor))
        if self._load_optimizer:
            saved_states = self._saved_states()
            for number, optimizer in enumerate(self.job.optimizers):
                plan.optimizers.append(self._planned_optimizer(parts, number, optimizer, saved_states[number]))
        return plan

    def _extra(self, name: str, value: Any) -> tuple[nn.Module, Any]:
        return self.job.model.module.get_submodule(name), value

    def _saved_states(self) -> dict[int, dict[str, list[str]]]:
        """The names of states, by optimizer and parameter."""
        found: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name, kind, optimizer, state in self.reader.tensors:
            if kind == SavedKind.STATE:
                found[optimizer][name].append(state)
        return found

    def _planned_optimizer(
        self, parts: _lamina.CheckpointParts, number: int, optimizer: OptimizerState, saved: dict[str, list[str]]
    ) -> "_OptimizerPlan":
        about = self._about_optimizers[number]
        plan = _OptimizerPlan(optimizer, about["groups"], about["rest"])

        for name, place, state, is_master in optimizer.own():
            if is_master:
                of = _lamina.StateName(number, "", name)
                self.reader.want_master(parts, of, place)
            if name in saved and optimizer.has_state_of(place):
                plan.states[name] = {
                    key: self._want_state(parts, optimizer, _lamina.StateName(number, key, name), place, state.get(key))
                    for key in saved[name]
                }
        return plan

    def _want_state(
        self,
        parts: _lamina.CheckpointParts,
        optimizer: OptimizerState,
        of: _lamina.StateName,
        place: torch.Tensor,
        held: Any,
    ) -> torch.Tensor:
        held = held if isinstance(held, torch.Tensor) else None
        return self.reader.want_state(parts, optimizer.parameters, of, place, held)

    def go_on(self) -> None:
        """Has counters and generators go on where they were, in the layout of the checkpoint."""
        job, reader = self.job, self.reader
        scale = reader.about("loss_scale", False) if self._load_optimizer else None
        if scale is not None and job.loss_scale is not None and job.loss_scale.is_dynamic:
            job.loss_scale.state = from_plain(scale)
        steps = reader.about("seeded_steps", False)
        if steps is not None and job.session.seeded_steps is not None:
            job.session.seeded_steps = steps
        if self._generators is not None:
            generators.restore(self._generators)


def _lacking(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[str]:
    """The options that a step needs and a saved group has not. Flags, and what may be None, classes of other versions
    have not either, and set."""
    needed = {key for key, value in optimizer.defaults.items() if not (value is None or isinstance(value, bool))}
    return sorted(needed - group.keys())


class _OptimizerPlan:
    """Says what an optimizer is to have on this rank beside its masters."""

    def __init__(self, optimizer: OptimizerState, groups: list[dict[str, Any]], rest: dict[str, Any]):
        self._optimizer, self._groups, self._rest = optimizer, groups, rest
        self.states: dict[str, dict[str, torch.Tensor]] = {}

    def load(self) -> None:
        named = {name: dict(self._values(state)) for name, state in self.states.items()}
        self._optimizer.load_own(named, self._groups, self._rest)

    @staticmethod
    def _values(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, Any]]:
        return (states.from_tensor(key, value) for key, value in state.items())


class _Plan:
    """Says what this rank is to have beside the tensors that the reader fills."""

    def __init__(self, model: PartitionedModel, extra: dict[str, tuple[nn.Module, Any]]):
        self._model, self._extra = model, extra
        self.optimizers: list[_OptimizerPlan] = []

    def load(self) -> None:
        for name, (module, value) in self._extra.items():
            if self._model.owns(name):
                module.set_extra_state(value)
        for plan in self.optimizers:
            plan.load()
