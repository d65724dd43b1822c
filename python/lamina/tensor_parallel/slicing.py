# SPDX-License-Identifier: Apache-2.0
"""The slicing of a model, when it is wrapped: layers get this rank's slices of the values of world rank 0."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError, said
from lamina.job import current
from lamina.tensor_parallel import dropout, layers, plans
from lamina.tensor_parallel.calls_elsewhere import DropoutContext
from lamina.tensor_parallel.cuts import Around, Cuts, LayerCut, cuts_of
from lamina.tensor_parallel.layers import Slicing
from lamina.tensor_parallel.regions import make_regions
from lamina.tensor_parallel.registry import DistributedModule
from lamina.tensor_parallel.turns import Turns
from lamina.tensor_parallel.unslicing import plainly, remember
from lamina.torch_patches import checkpoints, compiled_slices, foreign, slice_gradients, slice_values
from lamina.util.told import tell


class Ranks(Protocol):
    """Ranks that layers are cut over, as this one knows them: a session has all of it."""

    @property
    def rank(self) -> int: ...
    @property
    def config(self) -> Any: ...
    def group_size(self, group: str) -> int: ...
    def group_rank(self, group: str) -> int: ...
    def team(self) -> str: ...
    def slice(self, parameters: Any, make: Any) -> None: ...


def slice_model(root: nn.Module, session: _lamina.Session, make: Callable[[list[torch.Tensor]], None]) -> None:
    """Cuts the marked layers of a model over the ranks of TP_GROUP, in place; collective over the world. Nothing is
    changed unless all of them can be cut. Where values are to come, as in a change of the layout, slices have none yet.

    Args:
        make: makes delayed values of these parameters.

    Errors:
        UsageError: a plan does not fit the model, or sizes do not divide by the degree.
    """
    if not cut_layers(root, session, make):
        return
    job = current.job()
    job.call_context = DropoutContext()
    checkpoints.install(dropout.recomputing, job.on_end)
    compiled_slices.install(job.on_end)
    foreign.watch_slices(job.on_end)
    slice_gradients.install(job.on_end)
    slice_values.install(job.on_end)


def cut_layers(root: nn.Module, ranks: Ranks, make: Callable[[list[torch.Tensor]], None]) -> dict[str, LayerCut]:
    """Does so, where the job need not hear of it. Returns the cuts of layers, by name.

    Args:
        ranks: the session, or what stands for one in a plan.
        make: see `slice_model`.

    Errors:
        UsageError: see `slice_model`.
    """
    plan, cuts = _planned(root, ranks)
    _tell_of_whole(plan, cuts.layers, ranks)
    if not cuts.layers:
        return {}
    rows = {
        id(parameter): (f"{name}.{key}", parameter, slicing)
        for name, cut in cuts.layers.items()
        for key, slicing in cut.slices.items()
        for parameter in [cut.layer._parameters[key]]
    }
    ranks.slice(list(rows.values()), make)
    for cut in cuts.layers.values():
        _become_sliced(cut)
    for each in cuts.around:
        _become_around(each, ranks.team())
    for module in root.modules():
        if layers.has_fast_path(module) and any(map(layers.is_sliced, module.modules())):
            remember(module)
            layers.leave_fast_path(module)
    for module in root.modules() if _in_parts(ranks) else ():
        if isinstance(module, DistributedModule) and module.is_stack:
            layers.divide_positions(module, ranks.team(), ranks.group_rank("tp"), ranks.group_size("tp"))
    return cuts.layers


def require_cuts(root: nn.Module, ranks: Ranks) -> None:
    """Does nothing where the layers of a model, which may be cut already, can be cut over these ranks.

    Errors:
        UsageError: see `slice_model`.
    """
    with plainly(root):
        _planned(root, ranks)


def let_batches_take_turns(root: nn.Module, ranks: Ranks) -> None:
    """Has the ranks of TP_GROUP compute with the batches of all of them, where each has its own."""
    if _take_turns(ranks):
        turns = Turns(ranks.team(), ranks.group_size("tp"), ranks.group_rank("tp"))
        make_regions(root, turns, smallest=ranks.group_size("partitions") > 1)


@contextmanager
def wholes(root: nn.Module, session: _lamina.Session, write_back: bool = False) -> Iterator[None]:
    """Inside, whole tensors are in the places of sliced parameters, without memory where these have none; collective
    over TP_GROUP.

    Args:
        write_back: whether this rank's slices of what is written to them inside count; all ranks write the same.
    """
    slicings = layers.slicings(root)
    places = [
        (module._parameters, name, parameter, slicings[id(parameter)])
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in slicings
    ]
    lent: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor, Slicing]] = []
    try:
        for held, name, parameter, slicing in places:
            whole = nn.Parameter(_whole_of(parameter, slicing, session), parameter.requires_grad)
            lent.append((held, name, parameter, whole, slicing))
            held[name] = whole
        yield
        for _, _, parameter, whole, slicing in lent if write_back else ():
            if not whole.is_meta:
                with torch.no_grad():
                    parameter.copy_(session.slice_of(whole.detach(), slicing))
    finally:
        for held, name, parameter, _, _ in lent:
            held[name] = parameter


def _whole_of(parameter: torch.Tensor, slicing: Slicing, session: _lamina.Session) -> torch.Tensor:
    if parameter.is_meta:
        return torch.empty(layers.unsliced(parameter.shape, slicing), dtype=parameter.dtype, device="meta")
    return session.whole_of(parameter.detach(), slicing)


def _take_turns(ranks: Ranks) -> bool:
    return ranks.group_size("replicas") != ranks.group_size("same_parts")


def _in_parts(ranks: Ranks) -> bool:
    """True where activations of stacks lie in parts of positions. Where batches take turns such a stack is one region,
    which partitions could not cut."""
    are_cut = _take_turns(ranks) and ranks.group_size("partitions") > 1
    return ranks.config.optimize == "memory" and not are_cut


def _become_sliced(cut: LayerCut) -> None:
    sizes = {name: count for name, count in cut.sizes.items() if name in cut.layer.__dict__}
    remember(cut.layer, tuple(sizes))
    for attribute, count in sizes.items():
        setattr(cut.layer, attribute, count)
    layers.become_sliced(cut.layer, cut.style, cut.slices, cut.here)


def _become_around(cut: Around, team: str) -> None:
    remember(cut.module, tuple(cut.attributes))
    for member, _ in cut.members:
        remember(member)
    for attribute, number in cut.attributes.items():
        setattr(cut.module, attribute, number)
    layers.become_around(cut.module, cut.heads, cut.keys, cut.members, team)


# Before anything is changed.


def _planned(root: nn.Module, ranks: Ranks) -> tuple[plans.Plan, Cuts]:
    plan = plans.plan_of(root, ranks.group_size("tp"), _in_parts(ranks))
    cuts = cuts_of(plan, ranks.group_size("tp"), ranks.group_rank("tp"), ranks.team())
    _require_parameters(cuts.layers)
    return plan, cuts


def _tell_of_whole(plan: plans.Plan, cuts: dict[str, LayerCut], ranks: Ranks) -> None:
    if ranks.rank != 0:
        return
    if not cuts:
        how = (
            "mark modules with lamina.tensor_parallelism() or lamina.set_tensor_parallelism(), by a plan where their "
            "class is not known"
        )
        tell(said("nothing-sliced", ranks.group_size("tp"), how))
    elif whole := _lamina.marked_but_whole(*plan.rows, set(cuts)):
        tell(said("stay-whole", ", ".join(whole)))


def _require_parameters(cuts: dict[str, LayerCut]) -> None:
    """UsageError where a layer computes what is to be cut from something else."""
    for name, cut in cuts.items():
        if cut.style in layers.OF_WRAPPERS:
            continue
        if lacking := [key for key in cut.slices or ("weight",) if cut.layer._parameters.get(key) is None]:
            own = ", ".join(key for key, _ in cut.layer.named_parameters()) or "nothing"
            raise UsageError(
                f"{name} is to be sliced, and computes its {lacking[0]} from {own}, as parametrizations, weight_norm, "
                "spectral_norm and pruning do, which would be that of a slice: leave it out of the plan, or make it a "
                "parameter before the model is wrapped (torch.nn.utils.parametrize.remove_parametrizations, "
                "torch.nn.utils.prune.remove)",
                code="tp-layer",
            )
