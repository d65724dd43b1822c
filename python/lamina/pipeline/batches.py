# SPDX-License-Identifier: Apache-2.0
"""The batches of a step function: into how many microbatches each is split, and what is said of it."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from lamina.errors import said
from lamina.job import current
from lamina.pipeline.split import Splitter
from lamina.util.told import tell

_OTHERWISE = 'To keep an argument whole: non_split_inputs=["name"]; another axis: input_split_axes={"name": 1}'


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

    def split(
        self, bound: inspect.BoundArguments, owners: int, job: current.Job
    ) -> tuple[list[inspect.BoundArguments], list[int]]:
        """The arguments of each microbatch, and its number of samples; [] where that is not known.

        Args:
            bound: the arguments of the call.
            owners: how many of the first are no batch: the object of a method.
            job: the current one.

        Errors:
            UsageError: see `Splitter.look` and `Splitter.cut`.
        """
        splitter = Splitter(job.microbatches, job.session.needs_all_microbatches)
        batch = self._batch(bound, owners)
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
            self._say_once(job, "split", f"split into {splitter.count} microbatches: {summary}. {_OTHERWISE}")
        elif "nothing" not in self._said:
            self._said.add("nothing")
            line = said("nothing-to-split", splitter.count, "list what is to be whole in non_split_inputs")
            warnings.warn(f"{self._name}: {line}", stacklevel=2)

    def _say_once(self, job: current.Job, what: str, line: str) -> None:
        if what not in self._said and job.session.rank == 0:
            tell(f"{self._name}: {line}")
        self._said.add(what)


def _is_rest(bound: inspect.BoundArguments, name: str) -> bool:
    return bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
