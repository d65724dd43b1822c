# SPDX-License-Identifier: Apache-2.0
"""Parameters that are sharded: see [Note: shards] in lamina/sharding/transfer.h."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError
from lamina.job import current


def name(sharding: _lamina.Sharding | None, own: Iterable[torch.Tensor], session: _lamina.Session) -> None:
    """Gives the parameters in `own`, which stay the same objects, attributes: `ds_tensor`, this rank's shard, a tensor
    of one dimension, with its size as `ds_tensor.ds_numel`; `ds_shape` and `ds_numel`, of the whole. Of one that stays
    whole here the shard is a part of its memory; a copy of it where that is not contiguous."""
    for parameter in own:
        number = number_of(sharding, parameter)
        shard = _part_of_whole(parameter, session) if number is None else sharding.shard(number)
        shard.ds_numel = shard.numel()
        parameter.ds_tensor, parameter.ds_shape, parameter.ds_numel = shard, parameter.shape, parameter.numel()


def forget(parameters: Iterable[torch.Tensor]) -> None:
    """Takes these attributes from parameters again, whose job goes on in another layout."""
    for parameter in parameters:
        for attribute in ("ds_tensor", "ds_shape", "ds_numel"):
            vars(parameter).pop(attribute, None)


def _part_of_whole(parameter: nn.Parameter, session: _lamina.Session) -> torch.Tensor:
    """Returns this rank's share of a parameter's memory, which grows where it does not divide by them: it stays the
    same one, for other tensors may lie in it. What has no room to grow has a shorter last part."""
    (_, _, size), (rank, count) = session.share_of(parameter.numel()), place(session)
    with _lamina.Unguarded():  # of slices it is a slice, too
        flat, storage = parameter.detach().reshape(-1), parameter.untyped_storage()
        if flat.data_ptr() == parameter.data_ptr() and _grow(storage, flat, size * count):
            flat = flat.as_strided((size * count,), (1,))
        return flat[rank * size : (rank + 1) * size]


def _grow(storage: torch.UntypedStorage, flat: torch.Tensor, numel: int) -> bool:
    """Makes room for so many elements in the memory of a flat tensor, zeros behind its own; False where others lie
    there, or it is not torch's own."""
    end = (flat.storage_offset() + flat.numel()) * flat.element_size()
    if numel == flat.numel() or end != storage.nbytes() or not storage.resizable():
        return False
    storage.resize_((flat.storage_offset() + numel) * flat.element_size())
    flat.as_strided((numel,), (1,))[flat.numel() :] = 0
    return True


def of_job() -> _lamina.Sharding | None:
    """The current job's; None where nothing is sharded."""
    job = current.job_if_any()
    model = None if job is None else job.partitioned_model
    return None if model is None else model.sharding


def number_of(sharding: _lamina.Sharding | None, parameter: torch.Tensor) -> int | None:
    """The number of a sharded parameter; None for one that is not."""
    return None if sharding is None else sharding.find(parameter)


def place(session: _lamina.Session) -> tuple[int, int]:
    """Which shard this rank has, of how many."""
    return session.group_rank("shard"), session.group_size("shard")


def load(sharding: _lamina.Sharding, values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Gives this rank's shards of these parameters their values; collective over the sharding group."""
    for parameter, value in values:
        if value.shape != parameter.ds_tensor.shape:
            raise UsageError(
                f"a value of shape {tuple(value.shape)} for a shard of {parameter.ds_tensor.numel()} elements, of a "
                f"parameter of shape {tuple(parameter.shape)}",
                code="state-other-cut",
            )
    sharding.before_update()
    with torch.no_grad():
        for parameter, value in values:
            parameter.ds_tensor.copy_(value)
    sharding.after_update()


def require_unchanged(convert: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """The sharded parameters; UsageError where `convert` gives them another dtype or device."""
    sharding = of_job()
    parameters = [parameter for _, parameter in sharding.parameters] if sharding is not None else []
    for parameter in parameters:
        like = convert(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
        if (like.dtype, like.device) != (parameter.dtype, parameter.device):
            raise UsageError(
                f"a sharded model was converted to {like.dtype} on {like.device}: convert the module before it becomes "
                "a DistributedModel",
                code="shard-converted",
            )
    return parameters


def zero_grad(module: nn.Module, set_to_none: bool) -> None:
    """Forgets the gradients of the shards of a module's parameters."""
    sharding = of_job()
    for parameter in module.parameters():
        if (number := number_of(sharding, parameter)) is not None:
            sharding.zero_grad(number, set_to_none)


def holder(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter, which has its gradient; the parameter where it is not sharded."""
    return parameter if number_of(of_job(), parameter) is None else parameter.ds_tensor


def measured(
    pairs: list[tuple[torch.Tensor, torch.Tensor | None]], norm_type: float
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Parameters and gradients with the norm of all of a gradient, as a tensor, in the place of a shard's; collective
    over the sharding group."""
    sharding = of_job()
    return pairs if sharding is None else sharding.measured(pairs, norm_type)


@contextmanager
def gathered_parameters(
    parameters: torch.Tensor | Iterable[torch.Tensor], write_back: bool = False, modifier_rank: int | None = None
) -> Iterator[None]:
    """As `whole_parameters.gathered_parameters`, of what is sharded alone: slices stay."""
    sharding = of_job()
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    found = [number for each in given if (number := number_of(sharding, each)) is not None]
    numbers = list(dict.fromkeys(found))  # a tied one once
    if not (write_back or modifier_rank is not None):
        with ExitStack() as held:
            for number in numbers:
                sharding.hold(number)
                held.callback(sharding.let_go, number)
            yield
        return
    current.outside_step("gathered_parameters(write_back=True)")
    if not numbers:
        yield
        return
    with _written(sharding, numbers, modifier_rank):
        yield


@contextmanager
def _written(sharding: _lamina.Sharding, numbers: list[int], modifier_rank: int | None) -> Iterator[None]:
    """Values of their own on each rank, of which the shards are taken at the end."""
    with ExitStack() as lent:
        for number in numbers:
            sharding.lend(number)
            lent.callback(sharding.take_back, number)
        memory = [sharding.parameter(number).data for number in numbers]
        yield
        written = [sharding.parameter(number).detach().clone() for number in numbers]
        for number, lent_memory in zip(numbers, memory, strict=True):
            sharding.parameter(number).data = lent_memory  # the script may have given it another one
    if modifier_rank is not None:
        session = current.session()
        ranks = session.all_gather("shard", written if session.group_rank("shard") == modifier_rank else None)
        written = ranks[modifier_rank]
    sharding.before_update()
    for number, value in zip(numbers, written, strict=True):
        sharding.write_back(number, value)
    sharding.after_update()


def are_among(tensors: Iterable[torch.Tensor]) -> bool:
    """True where one of these is a sharded parameter, not its shard."""
    sharding = of_job()
    return sharding is not None and any(sharding.find(tensor) is not None for tensor in tensors)
