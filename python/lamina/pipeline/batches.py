# SPDX-License-Identifier: Apache-2.0
"""The batches of a step function: into how many microbatches each is split, and what is said of it."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lamina.errors import UsageError, refusal, said
from lamina.job import current
from lamina.pipeline.split import Splitter, sample_lists
from lamina.util.told import tell, tells_details

_OTHERWISE = 'To keep an argument whole: non_split_inputs=["name"]; another axis: input_split_axes={"name": 1}'


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


class Batches:
    """Splits the arguments of the calls of one step function.

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
        self._lists = sample_lists()

    def split(
        self, bound: inspect.BoundArguments, owners: int, job: current.Job
    ) -> tuple[list[inspect.BoundArguments], list[int]]:
        """The arguments of each microbatch, and its number of samples; [] where that is not known.

        Args:
            bound: the arguments of the call.
            owners: how many of the first are no batch: the object of a method.
            job: the current one.

        Errors:
            UsageError: see `Splitter.look` and `Splitter.cut`; of Microbatches, numbers that do not fit.
        """
        batch = self._batch(bound, owners)
        if ready := {key: value for key, value in batch.items() if isinstance(value, Microbatches)}:
            return self._ready(bound, ready, job)
        splitter = Splitter(job.microbatches, job.session.needs_all_microbatches, self._sample_lists(batch, job))
        for (_, name), value in batch.items():
            splitter.look(value, self._axes.get(name, 0), name, name in self._axes)
        splitter.cut()
        if splitter.count < job.microbatches:
            self._say_once(job, "fewer", said("fewer-microbatches", splitter.count, job.microbatches))
        if splitter.count > 1 and batch:
            splitter.require_no_offsets()
            self._tell(splitter, job)
        pieces = {key: splitter.split(value, self._axes.get(key[1], 0), key[1]) for key, value in batch.items()}
        each = [
            self._part(bound, {key: parts[microbatch] for key, parts in pieces.items()})
            for microbatch in range(splitter.count)
        ]
        return each, splitter.samples

    def _sample_lists(self, batch: Mapping[tuple[bool, str], Any], job: current.Job) -> list[Any]:
        """The lists among the arguments that hold an element for each sample.

        Errors:
            UsageError: one of them may be either.
        """
        if job.microbatches == 1:
            return []
        named = ((name, value, self._axes.get(name, 0), name in self._axes) for (_, name), value in batch.items())
        found, not_clear = self._lists.find(named)
        if not_clear is not None:
            name = not_clear.partition("[")[0].partition(".")[0]
            remedy = (
                f'input_split_axes={{"{name}": 0}} cuts each tensor in it, non_split_inputs=["{name}"] gives it whole '
                "to each microbatch, and lamina.Microbatches(pieces) is cut already"
            )
            raise refusal("list-not-clear", f"argument {not_clear}", remedy)
        return found

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
        """Returns the arguments with these in the places of those of the same names."""
        arguments = {}
        for name, value in bound.arguments.items():
            if _is_rest(bound, name):
                arguments[name] = {key: part.get((True, key), item) for key, item in value.items()}
            else:
                arguments[name] = part.get((False, name), value)
        return inspect.BoundArguments(bound.signature, arguments)

    def _tell(self, splitter: Splitter, job: current.Job) -> None:
        if summary := splitter.summary():
            told = job.own(_functions_told_of)
            if told and id(self) not in told and not tells_details():
                return  # one is enough to know how
            told.add(id(self))
            self._say_once(job, "split", f"split into {splitter.count} microbatches: {summary}. {_OTHERWISE}")
        elif "nothing" not in self._said:
            self._said.add("nothing")
            line = said("nothing-to-split", splitter.count, "list what is to be whole in non_split_inputs")
            warnings.warn(f"{self._name}: {line}", stacklevel=2)

    def _say_once(self, job: current.Job, what: str, line: str) -> None:
        if what not in self._said and job.session.rank == 0:
            tell(f"{self._name}: {line}")
        self._said.add(what)


def _functions_told_of() -> set[int]:
    """The ids of the Batches of a job of which it was said how they are cut."""
    return set()


def _is_rest(bound: inspect.BoundArguments, name: str) -> bool:
    return bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
