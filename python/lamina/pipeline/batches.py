# SPDX-License-Identifier: Apache-2.0
"""The batches of a step function: into how many microbatches each is split, and what is said of it."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lamina import _lamina
from lamina.errors import UsageError
from lamina.job import current, ranks
from lamina.pipeline.split import Splitter
from lamina.util import pytree
from lamina.util.told import tell, tells_details


class Microbatches:
    """An argument of a step function that is cut already: `train(lamina.Microbatches(pieces))`. Microbatches may have
    any sizes. There are at most `lamina.num_microbatches()` of them, with one partition any number. All arguments of a
    call that are no Microbatches go whole to each.

    Args:
        items: one for each microbatch, of any type.
        samples: how many samples each has, by which its gradients count; else all count alike.

    Errors:
        UsageError: no items, or not as many samples as items.
    """

    def __init__(self, items: Sequence[Any], samples: Sequence[int] | None = None):
        self.items, self.samples = list(items), list(samples or ())
        if not self.items or len(self.samples) not in (0, len(self.items)):
            raise UsageError(f"Microbatches of {len(self.items)} items and {len(self.samples)} numbers of samples")


def on_rank(batch: Any) -> Any:
    """The batch with its tensors of the host on the rank's device."""
    device = ranks.device()
    if device.type == "cpu":
        return batch
    return pytree.map_tensors(lambda each: _lamina.upload(each, device) if each.device.type == "cpu" else each, batch)


class Batches:
    """Splits the arguments of the calls of one step function, and takes them to the rank's device.

    Args:
        name: of the function.
        whole: names of arguments that every microbatch gets whole.
        axes: the axis along which the tensors of an argument are split, by the argument's name; else 0.
    """

    def __init__(self, name: str, whole: frozenset[str], axes: Mapping[str, int]):
        self._name = name
        self._whole = whole
        self._axes = axes
        self._said: set[str] = set()
        self._known = _lamina.KnownParts()

    def split(
        self, bound: inspect.BoundArguments, owners: int, job: current.Job
    ) -> tuple[list[inspect.BoundArguments], list[int]]:
        """The arguments of each microbatch, and its number of samples; [] where that is not known.

        Args:
            bound: the arguments of the call.
            owners: how many of the first are no batch: the object of a method.
            job: the current one.

        Errors:
            UsageError: see `Splitter.split`; of Microbatches, numbers that do not fit.
        """
        batch = self._batch(bound, owners)
        if ready := {key: value for key, value in batch.items() if isinstance(value, Microbatches)}:
            return self._ready(bound, ready, job)
        splitter = Splitter(job.microbatches, job.session.needs_all_microbatches, self._known)
        for (_, name), value in batch.items():
            splitter.look(name, value, self._axes.get(name, 0), name in self._axes)
        pieces = splitter.split()
        self._tell(splitter.engine, job)
        each = [
            self._part(bound, {key: parts[microbatch] for key, parts in zip(batch, pieces, strict=True)})
            for microbatch in range(splitter.engine.microbatches)
        ]
        return each, splitter.engine.samples

    def _ready(
        self, bound: inspect.BoundArguments, ready: dict[tuple[bool, str], Microbatches], job: current.Job
    ) -> tuple[list[inspect.BoundArguments], list[int]]:
        """`split` where the caller has done it."""
        counts = {name: len(value.items) for (_, name), value in ready.items()}
        count, most = next(iter(counts.values())), job.microbatches
        if len(set(counts.values())) > 1:
            raise UsageError(f"Microbatches of different numbers: {', '.join(f'{c} {n}' for n, c in counts.items())}")
        if count > most if job.pipelined else job.session.needs_all_microbatches and count != most:
            word = "at most" if job.pipelined else "exactly"
            raise UsageError(
                f"{count} Microbatches, where a step of this job has {word} {most}: see `microbatches` of init"
            )
        each = [
            self._part(bound, {key: value.items[microbatch] for key, value in ready.items()})
            for microbatch in range(count)
        ]
        return each, next((value.samples for value in ready.values() if value.samples), [])

    def _batch(self, bound: inspect.BoundArguments, owners: int) -> dict[tuple[bool, str], Any]:
        """Returns the arguments that are split, by name, and whether they are of `**kwargs`."""
        batch: dict[tuple[bool, str], Any] = {}
        for name, value in list(bound.arguments.items())[owners:]:
            is_rest = _is_rest(bound, name)
            named = value if is_rest else {name: value}
            batch |= {(is_rest, key): item for key, item in named.items() if key not in self._whole}
        return batch

    @staticmethod
    def _part(bound: inspect.BoundArguments, part: dict[tuple[bool, str], Any]) -> inspect.BoundArguments:
        """Returns the arguments with these in the places of those of the same names. They go to the rank's device only
        now, for numbers that say how a batch is split are read on the host."""
        part = {key: on_rank(value) for key, value in part.items()}
        arguments = {}
        for name, value in bound.arguments.items():
            if _is_rest(bound, name):
                arguments[name] = {key: part.get((True, key), item) for key, item in value.items()}
            else:
                arguments[name] = part.get((False, name), value)
        return inspect.BoundArguments(bound.signature, arguments)

    def _tell(self, splitter: _lamina.BatchSplitter, job: current.Job) -> None:
        for remark in splitter.remarks():
            if (remark == "split" and self._is_told_elsewhere(job)) or remark in self._said:
                continue
            self._said.add(remark)
            line = f"{self._name}: {splitter.text(remark)}"
            if remark == "nothing":
                warnings.warn(line, stacklevel=2)
            elif job.session.rank == 0:
                tell(line)

    def _is_told_elsewhere(self, job: current.Job) -> bool:
        """True where it was said of another step function of the job how its batch is cut: one is enough."""
        told = job.own(_functions_told_of)
        if told and id(self) not in told and not tells_details():
            return True
        told.add(id(self))
        return False


def _functions_told_of() -> set[int]:
    """The ids of the Batches of a job of which it was said how they are cut."""
    return set()


def _is_rest(bound: inspect.BoundArguments, name: str) -> bool:
    return bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
