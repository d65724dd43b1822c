# SPDX-License-Identifier: Apache-2.0
"""Whole values of parameters of which a rank has a shard, or a slice, or a shard of that."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from lamina import _lamina
from lamina.errors import DesyncError, UsageError
from lamina.job import current
from lamina.model import shards
from lamina.tensor_parallel import layers
from lamina.tensor_parallel.layers import Slicing


@contextmanager
def gathered_parameters(
    parameters: torch.Tensor | Iterable[torch.Tensor], write_back: bool = False, modifier_rank: int | None = None
) -> Iterator[None]:
    """Inside, these parameters of a model that is sharded, or sliced, have their whole values, which may be read.
    Called on every rank of the TP_GROUP for what is sliced, and of the sharding group where that shares no memory.

    Args:
        parameters: one or more; those that are whole here have their values anyway.
        write_back: whether what is written to them inside counts. Then every rank of all these groups calls this, and
            writes the same.
        modifier_rank: a rank of the sharding group (RDP_GROUP's first `sharded_data_parallel_degree` ranks, and so on),
            or of the TP_GROUP where nothing is sharded, whose values count in the place of each rank's own; implies
            `write_back`.

    Errors:
        UsageError: inside a step function with `write_back`; or a slice was written to without.
        DesyncError: the ranks of the TP_GROUP have written different values.
    """
    named = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    given = list({id(each): each for each in named}.values())  # a tied one once
    writes = write_back or modifier_rank is not None
    if writes:
        current.outside_step("gathered_parameters(write_back=True)")
    is_sharded = any(shards.number_of(shards.of_job(), each) is not None for each in given)
    with shards.gathered_parameters(given, write_back, modifier_rank), ExitStack() as lent:
        wholes = [_Whole(each, slicing) for each in given if (slicing := _slicing_of(each)) is not None]
        for whole in wholes:
            whole.lend()
            lent.callback(whole.take_back)
        yield
        for whole in wholes:
            whole.end(writes, None if is_sharded else modifier_rank)


def get_full_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """The whole value of a parameter, sharded, sliced or neither, as a tensor of its own. Called on every rank of the
    TP_GROUP for what is sliced, and of the sharding group where the group does not share memory."""
    with shards.gathered_parameters(parameter), torch.no_grad():
        slicing = _slicing_of(parameter)
        if slicing is not None:
            return current.session().whole_of(parameter.detach(), slicing)
        return parameter.detach().clone()


def get_full_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The whole gradient of a parameter, sharded, sliced or neither, as a tensor of its own; None where there is none.
    Collective over the sharding group, and the TP_GROUP."""
    sharding = shards.of_job()
    number = shards.number_of(sharding, parameter)
    own = parameter.grad if number is None else parameter.ds_tensor.grad
    if own is None:
        return None
    gradient = own.detach().clone() if number is None else sharding.gather(number, own)
    slicing = _slicing_of(parameter)
    return gradient if slicing is None else current.session().whole_of(gradient, slicing)


class _Whole:
    """A sliced parameter that is whole for a while."""

    def __init__(self, parameter: torch.Tensor, slicing: Slicing):
        self._parameter, self._slicing, self._slice = parameter, slicing, parameter.data
        self._name = _lamina.name_guarded(parameter)
        self._value: torch.Tensor | None = None  # that counts, in the end

    def lend(self) -> None:
        """Collective over the TP_GROUP."""
        self._parameter.data = current.session().whole_of(self._slice, self._slicing)
        self._version = self._parameter._version

    def end(self, writes: bool, modifier_rank: int | None) -> None:
        """Collective over the TP_GROUP where it is written to."""
        session = current.session()
        if not writes:
            if self._parameter._version != self._version:
                raise UsageError(
                    f"{self._name} was changed while it was whole, and its slice stays as it was: write "
                    "in lamina.gathered_parameters([parameter], write_back=True)",
                    code="tp-written",
                )
            return
        written = self._parameter.detach()
        digest = hashlib.sha256(written.contiguous().view(-1).view(torch.uint8).cpu().numpy()).digest()
        is_given = modifier_rank in (None, session.group_rank("tp"))
        found = session.all_gather("tp", (digest, written if is_given and modifier_rank is not None else None))
        if modifier_rank is not None:
            written = found[modifier_rank][1]
        elif len({each for each, _ in found}) > 1:
            raise DesyncError(
                f"the ranks of a TP_GROUP have written different values to {self._name}, of which each takes its part: "
                "write the same on all, or say with modifier_rank whose values count",
                code="tp-written",
            )
        self._value = session.slice_of(written, self._slicing)

    def take_back(self) -> None:
        """The slice is here again, with what has been written."""
        self._parameter.data = self._slice
        _lamina.guard_again(self._parameter)
        if self._value is not None:
            with torch.no_grad():
                self._parameter.copy_(self._value)


def _slicing_of(tensor: torch.Tensor) -> Slicing | None:
    """How a guarded slice is cut: a parameter, or what comes of it; None for all others."""
    name = _lamina.name_guarded(tensor)
    job = current.job_if_any()
    if not name or job is None or not job.has_model:
        return None
    where, _, key = name.rpartition(".")
    return layers.slicing_of(job.model.module.get_submodule(where), key)
