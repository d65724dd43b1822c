# SPDX-License-Identifier: Apache-2.0
"""The batches of a step function: into how many microbatches each is split, and what is said of it."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from lamina.errors import said
from lamina.job import current
from lamina.pipeline.split import Splitter, UnevenError
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
    ) -> tuple[list[inspect.BoundArguments], str]:
        """The arguments of each microbatch. Where they cannot be split into as many as configured, into fewer, and the
        error that a backward of them is, as text.

        Args:
            bound: the arguments of the call.
            owners: how many of the first are no batch: the object of a method.
            job: the current one.

        Errors:
            UsageError: see `Splitter.split`.
        """
        uneven = ""
        for count in range(job.microbatches, 0, -1):
            try:
                pieces = self._pieces(bound, owners, count, job)
                break
            except UnevenError as error:
                uneven = uneven or str(error)
        if uneven:
            self._say_once(job, "fewer", said("fewer-microbatches", count, job.microbatches))
        return pieces, uneven

    def _pieces(
        self, bound: inspect.BoundArguments, owners: int, count: int, job: current.Job
    ) -> list[inspect.BoundArguments]:
        splitter = Splitter(count)
        pieces: dict[str, list[Any]] = {}
        asked = False  # to split anything
        for place, (name, value) in enumerate(bound.arguments.items()):
            if place < owners:
                pieces[name] = [value] * count
            elif bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                each = [self._pieces_of(splitter, key, item, count) for key, item in value.items()]
                pieces[name] = [dict(zip(value, parts, strict=True)) for parts in zip(*each, strict=True)]
                asked = asked or not self._whole >= value.keys()
            else:
                pieces[name] = self._pieces_of(splitter, name, value, count)
                asked = asked or name not in self._whole
        if count > 1 and asked:
            splitter.require_no_offsets()
            self._tell(splitter, count, job)
        return [
            inspect.BoundArguments(bound.signature, {name: piece[microbatch] for name, piece in pieces.items()})
            for microbatch in range(count)
        ]

    def _pieces_of(self, splitter: Splitter, name: str, value: Any, count: int) -> list[Any]:
        splitter.is_said = name in self._axes
        return [value] * count if name in self._whole else splitter.split(value, self._axes.get(name, 0), name)

    def _tell(self, splitter: Splitter, count: int, job: current.Job) -> None:
        if summary := splitter.summary():
            self._say_once(job, "split", f"split into {count} microbatches: {summary}. {_OTHERWISE}")
        elif "nothing" not in self._said:
            self._said.add("nothing")
            line = said("nothing-to-split", count, "list what is to be whole in non_split_inputs")
            warnings.warn(f"{self._name}: {line}", stacklevel=2)

    def _say_once(self, job: current.Job, what: str, line: str) -> None:
        if what not in self._said and job.session.rank == 0:
            tell(f"{self._name}: {line}")
        self._said.add(what)
