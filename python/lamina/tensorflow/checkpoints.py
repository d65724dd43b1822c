# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a model whose variables are spread over ranks: each rank has files of its own."""

import json
import os
import re
from typing import Any

from lamina.errors import ConfigError, UsageError
from lamina.job import current
from lamina.job.messages import allgather
from lamina.job.ranks import CommGroup, mp_rank
from lamina.tensorflow import copies
from lamina.tensorflow.installed import tf
from lamina.tensorflow.model import ModelOfJob

_LAYOUT = "layout/.ATTRIBUTES/py_state"  # where TensorFlow keeps the layout that `_Layout` writes


class _Layout(tf.train.experimental.PythonState):
    """The variables that the rank's file has, by number, type and sizes: it goes with a checkpoint."""

    def __init__(self, variables: list[tuple[Any, ...]]):
        self.text = json.dumps(variables)

    def serialize(self) -> str:
        return self.text

    def deserialize(self, string_value: Any) -> None:
        """Does nothing: it was compared before anything was restored."""


def folder_of_rank(directory: str) -> str:
    """The folder of this rank's files below one."""
    return os.path.join(directory, f"mp_rank_{mp_rank()}")


class CheckpointManager:
    """Writes and reads what a `tf.train.Checkpoint` has, of each rank into a folder of its own, `mp_rank_N`: the
    model's variables on the rank that owns them, and all else on each. Of several copies the first one writes, and all
    read.

    Attributes:
        checkpoint: the script's.
        directory: this rank's folder.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str = "/opt/ml/checkpoints",
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
    ):
        """Writes nothing yet.

        Args:
            checkpoint: what to save.
            directory: has a folder for each rank.
            max_to_keep: so many of the latest; None for all.
            checkpoint_name: what stands before their numbers: "ckpt-1".
        """
        self.checkpoint = checkpoint
        self.directory = folder_of_rank(os.fspath(directory))
        self._most, self._name = max_to_keep, checkpoint_name
        self._manager: tf.train.CheckpointManager | None = None
        self._layout = ""

    @property
    def checkpoints(self) -> list[str]:
        """This rank's, as far as this manager knows them, the oldest first."""
        return self._manager.checkpoints if self._manager is not None else []

    @property
    def latest_checkpoint(self) -> str | None:
        """This rank's latest one."""
        return self._manager.latest_checkpoint if self._manager is not None else None

    def save(self) -> str:
        """Saves a new one; collective. Returns where this rank's is.

        Errors:
            UsageError: before the first step, or a rank could not write.
        """
        error = path = None
        try:
            path = self._saved(self._made("save()"))
        except Exception as found:
            error = found
        words = allgather(None if error is None else f"{type(error).__name__}: {error}", CommGroup.WORLD)
        if error is not None:
            raise error
        for rank, each in enumerate(words):
            if each is not None:
                raise UsageError(f"rank {rank} could not save its part of a checkpoint: {each}")
        if copies.of_job().own > 0:  # learns what the first copy has written
            root = self._manager.checkpoint
            self._manager = tf.train.CheckpointManager(root, self.directory, self._most, checkpoint_name=self._name)
        return path

    def restore(self, restore_prefix: str | None = None) -> str | None:
        """Restores a checkpoint on all ranks; collective, after the first step. Returns where this rank's is; None, and
        restores nothing, where there is none.

        Args:
            restore_prefix: its name, such as "ckpt-2"; None for the latest that every rank has.

        Errors:
            UsageError: before the first step. ConfigError: some ranks have none, or another layout wrote it.
        """
        name = self._agreed(None if restore_prefix is None else os.path.basename(restore_prefix))
        if name is None:
            return None
        manager = self._made("restore()")
        path = os.path.join(self.directory, name)
        reader = tf.train.load_checkpoint(path)
        written = reader.get_tensor(_LAYOUT).decode() if reader.has_tensor(_LAYOUT) else None
        same = allgather(written == self._layout, CommGroup.WORLD)
        if not all(same):
            rank = same.index(False)
            raise ConfigError(
                f"{name} of rank {rank} has other variables than that rank: the model was cut in another way when it "
                "was saved. Restore with the same partitions, or place layers by hand (smp.partition)"
            )
        manager.checkpoint.restore(path)
        return path

    def _saved(self, manager: tf.train.CheckpointManager) -> str:
        if copies.of_job().own == 0:
            return manager.save()
        number = manager.checkpoint.save_counter.assign_add(1)
        return os.path.join(self.directory, f"{self._name}-{int(number)}")

    def _made(self, what: str) -> tf.train.CheckpointManager:
        if self._manager is None:
            state = current.job().own(ModelOfJob)
            if not state.owners:
                raise UsageError(f"{what} of a checkpoint before the first step, which says who owns which variable")
            own = _own_variables(state.model)
            layout = _Layout([(at, str(each.dtype), *each.shape) for at, each in own.items()])
            root = tf.train.Checkpoint(checkpoint=self.checkpoint, variables=own, layout=layout)
            self._layout = layout.text
            self._manager = tf.train.CheckpointManager(root, self.directory, self._most, checkpoint_name=self._name)
        return self._manager

    def _agreed(self, name: str | None) -> str | None:
        """Returns that checkpoint, or the latest, if all ranks have it; None if no rank has one."""
        here = [file.removesuffix(".index") for file in _files(self.directory) if file.endswith(".index")]
        found = [each for each in here if (self._number(each) is not None if name is None else each == name)]
        every = allgather(found, CommGroup.WORLD)
        common = set(every[0]).intersection(*every[1:])
        if common:
            return name or max(common, key=self._number)
        for rank, each in enumerate(every):
            if each:
                other = next((at for at, theirs in enumerate(every) if not theirs), None)
                lacks = f"rank {other} has none" if other is not None else "ranks have none in common"
                raise ConfigError(f"rank {rank} has the checkpoint {each[-1]} to restore, and {lacks}")
        return None

    def _number(self, name: str) -> int | None:
        found = re.fullmatch(re.escape(self._name) + r"-(\d+)", name)
        return int(found[1]) if found else None


def _own_variables(model: Any) -> dict[str, Any]:
    """The rank's variables by their numbers in the model: names may count what the process has made before."""
    own = {id(variable) for variable in model.variables}
    return {str(at): variable for at, variable in enumerate(model._keras_variables()) if id(variable) in own}


def _files(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
