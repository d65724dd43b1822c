# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training: when they are saved, and how it goes on from one."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lamina.checkpoints.loading import resume_from_checkpoint
from lamina.checkpoints.saving import CheckpointHandle, save_checkpoint
from lamina.errors import ConfigError, Error
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD, rank
from lamina.job.seeds import set_rng_seed
from lamina.trainer import checks
from lamina.trainer.events import Callback, Event
from lamina.trainer.job import take_loaded
from lamina.trainer.shares import Shares
from lamina.trainer.states_of_ranks import differing, own_of
from lamina.trainer.time import Time, Timestamp, TimeUnit
from lamina.trainer.training_state import TrainingState
from lamina.util.told import tell

_RANK = re.compile(r"[-_.]?rank(\{rank\}|\d+)|\.pt$")  # parts of a name: a checkpoint is one of all ranks
_PARTIAL = "_partial"  # the end of the name of a folder that has more than the model
_FORM = "trainer 1"  # of what a checkpoint has of a training: another where that is read in another way


class Saver(Callback):
    """Saves the training now and again, while it goes on.

    Args:
        folder: of the checkpoints, which all ranks see, with {run_name}.
        filename: their names: with {epoch}, {batch}, {sample}, {token}, {run_name}.
        interval: epochs or batches between them, and at the end of the training; or a function of State and event.
        weights_only: whether the model alone is saved.
        keeps: how many stay, the latest ones; -1: all; 0: none, so that none is saved.
        shares: what the training reads.

    Attributes:
        saves: whether any is saved.
        owes: whether one is saved at the next time of checkpoints in any case: a rank was lost while one was saved.

    Errors:
        ConfigError: a name that is none.
    """

    def __init__(
        self,
        folder: str,
        filename: str,
        interval: Time | Callable[[TrainingState, Event], bool],
        weights_only: bool,
        keeps: int,
        shares: Callable[[], Shares],
    ):
        self.folder = os.fspath(folder)
        self._name = _RANK.sub("", filename)
        if not self._name:
            raise checks.wrong("save_filename", filename, "a name, from which .pt and rank{rank} fall off")
        self._is_due = interval if callable(interval) else _periodically(interval)
        self._saves_end = not callable(interval)
        self.saves, self._keeps = keeps != 0, None if keeps == -1 else keeps
        self._weights_only, self._shares = weights_only, shares
        self._saved: Timestamp | None = None
        self.owes = False
        self._is_saving, self._handle = False, None  # the save is being put together; is perhaps being written
        self.places: list[str] = []  # of all that were saved
        self.tag_of(TrainingState(None, "run", 0))

    def name_folder(self, run_name: str) -> None:
        """Puts the name of the run in the place of {run_name}.

        Errors:
            ConfigError: with it, names of checkpoints are none.
        """
        self.tag_of(TrainingState(None, run_name or "run", 0))
        self.folder = self.folder.replace("{run_name}", run_name)

    def take_folder(self, goes_on: bool) -> None:
        """Makes the folder.

        Errors:
            ConfigError: it cannot be made; or, without `goes_on`, it has checkpoints: those of the same name would go.
        """
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"save_folder={self.folder!r}: {error.strerror}") from None
        if not goes_on and (found := sorted(Path(self.folder).glob("*/*.safetensors"))):
            raise ConfigError(
                f"save_folder={self.folder!r} has checkpoints, {found[-1].parent.name} for example: autoresume=True or "
                "load_path goes on from one, save_overwrite=True replaces those of the same name"
            )

    def tag_of(self, state: TrainingState) -> str:
        """The name of a checkpoint of now."""
        counts = {name: int(getattr(state.timestamp, name)) for name in ("epoch", "batch", "sample", "token")}
        try:
            found = self._name.format(run_name=state.run_name, **counts)
        except (KeyError, IndexError, ValueError) as error:
            names = ", ".join(f"{{{name}}}" for name in ("run_name", *counts))
            raise ConfigError(f"save_filename={self._name!r}: {error} is none of {names}") from None
        if "/" in found or found.startswith("."):
            raise checks.wrong("save_filename", found, "a name without /, and no dot begins it: save_folder says where")
        return found

    def run_event(self, event: Event, state: TrainingState, logger: Any) -> None:
        """Saves, where it is time."""
        if event not in (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT) or not self.saves:
            return
        if self.owes:
            self.save(state)
        elif self._saved == state.timestamp:
            return
        elif self._is_due(state, event) or (self._saves_end and state.is_done):
            self.save(state)

    def save(self, state: TrainingState, asynchronous: bool = True) -> None:
        """Saves now.

        Errors:
            ConfigError: there is nothing that is read, whose place a checkpoint of a training has.
        """
        if not self._weights_only and self._shares() is None:
            raise ConfigError(
                "a checkpoint of a training has its place in the data, and there is no train_dataloader yet: "
                "weights_only=True saves the model"
            )
        self._is_saving = True
        self._handle = self._save(state, asynchronous)
        self._is_saving = self.owes = False

    def was_broken_off(self) -> bool:
        """Tells, once a rank is lost and saves are given up, whether the latest checkpoint was not saved."""
        if self._is_saving or self.owes:
            return True
        try:
            if self._handle is not None:
                self._handle.wait()
        except Error:
            return True
        return False

    @property
    def saved(self) -> tuple[Timestamp | None, list[str]]:
        """The time of the latest checkpoint, and the paths of all."""
        return self._saved, self.places

    def go_back(self, saved: tuple[Timestamp | None, list[str]]) -> None:
        """The training goes back to when `saved` was that. The latest checkpoint is owed where it was broken off, and
        does not come again by itself."""
        self.owes = self.was_broken_off() and self._saved == saved[0]
        self._is_saving, self._handle = False, None
        self._saved, self.places[:] = saved

    def _save(self, state: TrainingState, asynchronous: bool) -> CheckpointHandle | None:
        take_loaded()  # where no step came before
        self._saved, place = state.timestamp, os.path.join(self.folder, self.tag_of(state))
        if not self.owes or self.places[-1:] != [place]:
            self.places.append(place)
        arguments = {"model": state.model, "asynchronous": asynchronous}
        if self._weights_only:
            return save_checkpoint(self.folder, self.tag_of(state), partial=False, **arguments)
        states = {"callbacks": _states(state.callbacks), "algorithms": _states(state.algorithms)}
        content = {
            "form": _FORM,
            "progress": state.progress(),
            "schedulers": [schedule.state_dict() for schedule in state.schedulers],
            **states,
            "of_ranks": {kind: differing(each) for kind, each in states.items()},
            "readers": allgather(self._shares().state_dict(), WORLD),
        }
        kept = {"user_content": content, "num_kept_partial_checkpoints": self._keeps}
        return save_checkpoint(self.folder, self.tag_of(state), optimizer=state.optimizers[0], **arguments, **kept)


def load(
    path: str, state: TrainingState, weights_only: bool, strict: bool, missing_ok: bool = False
) -> list[Any] | None:
    """Loads the checkpoint `path`, or the newest of that folder, into the state; with `missing_ok` the path is the
    folder of saves, which may hold files of others.

    Args:
        path: of a checkpoint, or of a folder with several.
        state: of the training, which goes on from there.
        weights_only: whether the model alone is loaded.
        strict: whether names of weights have to be those of the model.
        missing_ok: whether there may be none.

    Returns:
        What the ranks have read of the epoch, for Shares; None where it begins anew.

    Errors:
        ConfigError: something else has saved it than a Trainer of this form.
    """
    place = Path(path) if missing_ok else found_checkpoint(path)
    name = place.name.removesuffix(_PARTIAL)
    strays = sorted(place.glob("*.safetensors"))
    is_one = not missing_ok and (bool(strays) or place.name.endswith(_PARTIAL))
    if missing_ok and strays and rank() == 0:
        tell(f"{path}: {strays[0].name} belongs to no checkpoint there, and is left alone: checkpoints are folders")
    folder, tag = (place.parent, name) if is_one else (place, None)
    if is_one and not place.name.endswith(_PARTIAL):
        resume_from_checkpoint(folder, tag, partial=False, strict=strict, missing_ok=missing_ok)
        return None
    content = resume_from_checkpoint(folder, tag, strict=strict, load_optimizer=not weights_only, missing_ok=missing_ok)
    if content is None or weights_only:
        return None
    if not isinstance(content, dict) or content.get("form") != _FORM:
        raise ConfigError(
            f"{path} has no training that this version of the Trainer goes on with: load_path with "
            "load_weights_only=True takes its weights"
        )
    state.go_on(content["progress"])
    set_rng_seed(state.seed)
    for schedule, saved in zip(state.schedulers, content["schedulers"], strict=False):
        schedule.load_state_dict(saved)
    of_ranks = content.get("of_ranks", {})
    for kind, objects in (("callbacks", state.callbacks), ("algorithms", state.algorithms)):
        own = own_of(path, content[kind], of_ranks.get(kind, {}))
        if rank() == 0 and (left := sorted(own.keys() - _keys(objects))):
            tell(
                f"{path}: it has states of {kind} that are not here now: {', '.join(left)}, numbered within their class"
            )
        for key, each in zip(_keys(objects), objects, strict=True):
            if saved := own.get(key):
                each.load_state_dict(saved)
    return content["readers"]


def found_checkpoint(given: str) -> Path:
    """The folder of a checkpoint that has this path, or the name that it was saved by; else the path."""
    path = Path(given)
    name = _RANK.sub("", path.name)
    named = (path, *(path.with_name(name + end) for end in (_PARTIAL, "") if name))
    if name == "latest":  # by whatever name it was saved
        named = (*named, path.parent)
    return next((place for place in named if place.is_dir()), path)


def _keys(objects: list[Any]) -> list[str]:
    """Names of callbacks or algorithms: their classes', numbered."""
    names = [type(each).__name__ for each in objects]
    return [f"{name}.{names[:place].count(name)}" for place, name in enumerate(names)]


def states_of(state: TrainingState) -> list[dict[str, Any]]:
    """The states of callbacks, and of algorithms, that have some."""
    return [_states(state.callbacks), _states(state.algorithms)]


def put_states_of(state: TrainingState, found: list[dict[str, Any]]) -> None:
    """Puts them back, as `states_of` has given them."""
    for objects, states in zip((state.callbacks, state.algorithms), found, strict=True):
        for key, each in zip(_keys(objects), objects, strict=True):
            if key in states:
                each.load_state_dict(states[key])


def _states(objects: list[Any]) -> dict[str, Any]:
    return {key: state for key, each in zip(_keys(objects), objects, strict=True) if (state := each.state_dict())}


def _periodically(every: Time) -> Callable[[TrainingState, Event], bool]:
    event = Event.EPOCH_CHECKPOINT if every.unit is TimeUnit.EPOCH else Event.BATCH_CHECKPOINT
    return lambda state, now: now is event and state.timestamp.get(every.unit).value % every.value == 0
