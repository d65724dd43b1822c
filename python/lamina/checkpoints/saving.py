# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a whole job: model, optimizers, random generators and what the user adds, by all ranks together.

[Note: checkpoints] A checkpoint is a folder, PATH/TAG_partial, that is there as a whole or not at all; its format
stands in lamina/archive. Each rank writes the elements that are its own, once. Any layout loads what any other has
saved.
"""

import contextlib
import datetime
import os
from typing import Any

import torch

from lamina import _lamina
from lamina.checkpoints import generators, smp_files, smp_saving, states, together
from lamina.checkpoints.job_state import layout, optimizers_of, persistent, require_ready, version
from lamina.checkpoints.plain import sorted_plain, to_plain
from lamina.errors import Error, UsageError
from lamina.job import current
from lamina.job.arguments import require_same
from lamina.model import shards
from lamina.model.partitioned import is_odd
from lamina.optim.functional import class_name
from lamina.optim.named_state import Layout
from lamina.optim.optimizer_state import OptimizerState
from lamina.util.checks import require_booleans, require_count, require_no_nul


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


class Saves:
    """The saves of a job: one at a time."""

    def __init__(self) -> None:
        self._under_way: _lamina.Save | None = None
        self.snapshot = _lamina.Snapshot()

    def end(self) -> None:
        """Waits for the one that is under way, and raises what it ended with, unless that was raised already."""
        save, self._under_way = self._under_way, None
        if save is not None:
            save.end()

    def check_before_step(self) -> None:
        """Raises what it has failed with: on every rank before the same step."""
        if self._under_way is not None:
            self._under_way.check_before_step()

    def drop(self) -> None:
        """Gives up the one that is under way."""
        if self._under_way is not None:
            self._under_way.give_up()
            with contextlib.suppress(Error):
                self.end()

    def begin(self, save: _lamina.Save) -> CheckpointHandle:
        self._under_way = save
        return CheckpointHandle(save)


def of_job(job: current.Job) -> Saves:
    """The saves of a job, which waits for them before it ends."""
    if job.saves is None:
        job.saves = Saves()
    return job.saves


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
    """Saves model, optimizers, loss scale and random generators of the job as the checkpoint `path`/`tag`_partial.
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
            `path`/`tag`_partial, or with `partial=False` the file `path`/`tag`. In that form user_content is anything
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
    require_no_nul(path=path)
    if num_kept_partial_checkpoints is not None:
        require_count(num_kept_partial_checkpoints=num_kept_partial_checkpoints)
    if form not in (None, "lamina", smp_files.FORM):
        raise UsageError(f'save_checkpoint(): form is "lamina" or "{smp_files.FORM}", not {form!r}')
    if form == smp_files.FORM and asynchronous:
        raise UsageError('save_checkpoint(form="smp") is written while training waits: leave asynchronous out')
    saves = of_job(job)
    saves.end()
    if form == smp_files.FORM:
        kept = num_kept_partial_checkpoints or 0
        if partial:
            smp_saving.save_partial(job, os.fspath(path), tag, model, optimizer, user_content, kept)
        else:
            smp_saving.save_full(job, os.fspath(path), tag, model, user_content, translate_if_full)
        return None
    everything = _Everything(job, model, optimizer, user_content, allow_pickle, partial)
    everything.agree()
    save = _lamina.begin_save(
        job.session,
        everything.parts,
        os.fspath(path),
        tag,
        partial,
        everything.about(),
        allow_pickle,
        everything.texts(),
        num_kept_partial_checkpoints or 0,
        saves.snapshot if asynchronous else None,
    )
    if asynchronous:
        return saves.begin(save)
    save.wait()
    return None


def _which(job: current.Job, optimizer: torch.optim.Optimizer | None) -> str:
    """Names the optimizers that are meant, by their numbers: those of other ranks are other objects."""
    if optimizer is not None and not any(known.optimizer is optimizer for known in job.optimizers):
        return "none of the job's"
    numbers = (str(number) for number, known in enumerate(job.optimizers) if optimizer in (None, known.optimizer))
    return f"number {', '.join(numbers)}"


class _Everything:
    """Everything that a checkpoint of a job has.

    Attributes:
        parts: tensors that this rank writes.
    """

    def __init__(
        self,
        job: current.Job,
        model: Any,
        optimizer: torch.optim.Optimizer | None,
        user_content: Any,
        allow_pickle: bool,
        partial: bool,
    ) -> None:
        self._job = job
        self._partial = partial
        self._user_content: Any = None
        self._words: list[tuple] = []
        self._error: Exception | None = None
        word: tuple = ()
        try:
            require_ready(job, model)
            if job.session.rank == 0:
                self._user_content = _plain_content(user_content)
            _lamina.require_content(self._user_content, allow_pickle)
            self._model = job.cut.model
            self._optimizers = optimizers_of(job, optimizer) if partial else []
            generator_states = generators.states()
            self.parts = self._found(generator_states.pop("torch"))
            known = [optimizer.known() for optimizer in self._optimizers]
            word = (to_plain(generator_states), to_plain(dict(self._extra_state())), known)
        except Exception as error:  # which all ranks are to hear of
            self._error = error
        self._word = ("" if self._error is None else together.met_on(job.session.rank, self._error), word)

    def agree(self) -> None:
        """Hears what the other ranks have, and raises what keeps one of them from saving; collective over the world."""
        everyone = self._job.session.all_gather("world", self._word)
        if self._error is not None:
            raise self._error
        if problem := next((problem for problem, _ in everyone if problem), ""):
            raise UsageError(f"save_checkpoint() {problem}", code="checkpoint-refused")
        self._words = [word for _, word in everyone]

    def _found(self, generator: torch.Tensor) -> _lamina.PartsToSave:
        parts = _lamina.PartsToSave(_lamina.CheckpointParts(self._job.session, self._model.table))
        self._add_model(parts)
        if not self._partial:
            return parts
        for number, optimizer in enumerate(self._optimizers):
            for name, place, state, is_master in optimizer.own():
                if is_master:
                    parts.add_state(optimizer.parameters, _lamina.StateName(number, "", name), place, place)
                for key, value in states.to_tensors(name, state):
                    parts.add_state(optimizer.parameters, _lamina.StateName(number, key, name), place, value)
        parts.add_content(f"generator/{self._job.session.rank}", generator)
        return parts

    def _add_model(self, parts: _lamina.PartsToSave) -> None:
        module, sharding = self._job.model.module, self._model.sharding
        names: dict[int, list[str]] = {}
        for name, tensor in persistent(module):
            names.setdefault(id(tensor), []).append(name)
            if is_odd(tensor):
                raise UsageError(
                    f"{name} is sparse or quantised, which has no place in a checkpoint: register_buffer(..., "
                    "persistent=False), or save model.state_dict() with lamina.save",
                    code="checkpoint-cannot-save",
                )
        for name, tensor, owner in self._model.tensors():
            if owner != self._model.partition or id(tensor) not in names:
                continue
            is_sharded = shards.number_of(sharding, tensor) is not None
            parts.add_row(
                name,
                tensor.ds_tensor if is_sharded else tensor,
                [other for other in names[id(tensor)] if other != name],
            )

    def about(self) -> dict[str, Any]:
        """Returns what is no tensor; see [Note: checkpoints]."""
        job, session = self._job, self._job.session
        about: dict[str, Any] = {
            "lamina": version(),
            "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "layout": sorted_plain(layout(session)),
            "partition": sorted_plain(self._model.report.get("partition", {})),
            "optimizers": [
                _about_optimizer(optimizer, [known[number] for _, _, known in self._words])
                for number, optimizer in enumerate(self._optimizers)
            ],
            "user_content": self._user_content,
        }
        if self._partial:
            about["generators"] = [states for states, _, _ in self._words]
        if session.seeded_steps is not None:
            about["seeded_steps"] = session.seeded_steps
        if job.loss_scale is not None and job.loss_scale.is_dynamic:
            about["loss_scale"] = to_plain(job.loss_scale.state)
        if extra := {name: value for _, extra, _ in self._words for name, value in extra.items()}:
            about["extra_state"] = dict(sorted(extra.items()))
        return about

    def _extra_state(self) -> Any:
        for name, module in self._job.model.module.named_modules():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state and self._model.owns(name):
                yield name, module.get_extra_state()

    def texts(self) -> dict[str, str]:
        """Files of Hugging Face's that tell how to make the model."""
        config = getattr(self._job.model.module, "config", None)
        to_json = getattr(config, "to_json_string", None)
        return {"config.json": to_json()} if callable(to_json) else {}


def _plain_content(content: Any) -> Any:
    try:
        return to_plain(content)
    except RecursionError:
        raise UsageError(
            "user_content is nested too deeply, or holds itself: save what can be written down",
            code="checkpoint-cannot-save",
        ) from None


def _about_optimizer(optimizer: OptimizerState, known: list[Layout]) -> dict[str, Any]:
    groups, rest = optimizer.described(known)
    return {
        "class": class_name(optimizer.optimizer),
        "groups": [sorted_plain(group) for group in groups],
        "rest": to_plain(rest),
    }
