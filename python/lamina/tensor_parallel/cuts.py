# SPDX-License-Identifier: Apache-2.0
"""The cuts of planned layers: which dimensions of their parameters, in what units, and what each rank computes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from lamina.errors import UsageError, refusal
from lamina.tensor_parallel import layers, plans
from lamina.tensor_parallel.heads import Heads, Share, heads_of, share, whole_number
from lamina.tensor_parallel.layers import Here, Slicing, is_linear
from lamina.tensor_parallel.plans import Planned

_LINEAR_STYLES = ("colwise", "packed_colwise", "colwise_gather_output", "rowwise", "rowwise_split_input")
_EMBEDDING_STYLES = ("colwise", "colwise_gather_output", "embedding_colwise", "rowwise", "embedding_rowwise")
_ROWS = ("rowwise", "rowwise_split_input", "embedding_rowwise")
_REPLICATED = "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class LayerCut:
    """How a layer is cut.

    Attributes:
        layer: itself.
        style: one of STYLES of plans.py, or "chosen".
        slices: of its parameters, by name.
        here: its knowledge of its slice.
        sizes: its attributes that say how many features it has, as they are then.
    """

    layer: nn.Module
    style: str
    slices: dict[str, Slicing]
    here: Here
    sizes: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Around:
    """A module around layers that give parts, and what it has of them.

    Attributes:
        module: itself.
        members: the modules in it that give parts, with these, and that take them, with None.
        heads: None for a module without.
    """

    module: nn.Module
    members: list[tuple[nn.Module, Share | None]]
    heads: Heads | None


class Cutter:
    """Decides the cuts of a model's layers for a rank, of so many of a team.

    Errors:
        UsageError: sizes do not allow what the plan asks for.
    """

    def __init__(
        self, planned: Mapping[str, Planned], elsewhere: Iterable[Planned], degree: int, index: int, team: str
    ):
        self._degree, self._index, self._team = degree, index, team
        self._said = f"tensor_parallel_degree: {degree}"
        members: dict[int, list[Planned]] = {}
        elsewhere = list(elsewhere)
        for each in [*planned.values(), *elsewhere]:
            members.setdefault(id(each.parent), []).append(each)
        self._members = {key: each for key, each in members.items() if any(map(_gives_parts, each))}
        self._heads = {key: self._heads_of(each) for key, each in self._members.items()}
        self._require_said_heads()
        self._places = {key: each[0].place for key, each in self._members.items() if self._heads[key] is not None}
        for each in elsewhere:
            self._require_same_heads(planned[each.name], each)
        self.cuts = {each.name: self._cut(each) for each in planned.values()}

    def around(self) -> list[Around]:
        """The modules that compute with parts."""
        return [
            Around(
                members[0].parent,
                [
                    (each.member, self.cuts[each.name].here.share if _gives_parts(each) else None)
                    for each in members
                    if _gives_parts(each) or each.style == "rowwise"
                ],
                self._heads[key],
            )
            for key, members in self._members.items()
        ]

    def _heads_of(self, members: list[Planned]) -> Heads | None:
        columns = [_extent(each) for each in members if _gives_parts(each)]
        rows = [_extent(each) for each in members if each.style == "rowwise" and is_linear(each.layer)]
        said = next((each.heads for each in members if each.heads is not None), None)
        return heads_of(members[0].parent, columns, rows, self._degree, self._index, self._said, said)

    def _require_said_heads(self) -> None:
        """Errors: UsageError: no module has the attribute that a script has named."""
        names = {each.heads for members in self._members.values() for each in members if isinstance(each.heads, str)}
        found = {heads.said for heads in self._heads.values() if heads is not None}
        if missing := sorted(names - found):
            kinds = sorted({type(each[0].parent).__name__ for each in self._members.values()})
            raise UsageError(
                f'set_tensor_parallelism(heads="{missing[0]}"): no module around layers of the plan that are cut by '
                f"columns has such a number: there are {', '.join(kinds)}",
                code="tp-plan",
            )

    def _require_same_heads(self, planned: Planned, elsewhere: Planned) -> None:
        found = (self._heads.get(id(each.parent)) for each in (planned, elsewhere))
        if len({(heads.count, heads.keys, heads.width) for heads in found if heads is not None}) > 1:
            raise UsageError(
                f"{planned.name} is in {elsewhere.place}, too, which has other heads: leave it out of the plan",
                code="tp-layer",
            )

    def _cut(self, planned: Planned) -> LayerCut:
        layer, style = planned.layer, planned.style
        if style == _REPLICATED:
            return LayerCut(layer, style, {}, Here(self._team))
        if planned.is_around and is_linear(layer):
            return self._cut_of_wrapper(planned)
        if isinstance(layer, nn.Embedding):
            return self._cut_of_embedding(planned)
        if not is_linear(layer) or style not in _LINEAR_STYLES:
            raise UsageError(
                f"{planned.name} is a {type(layer).__name__}, and a plan slices torch's Linear and Embedding and "
                f'transformers\' Conv1D alone, here as "{style}": leave it out of the plan',
                code="tp-layer",
            )
        extent = _extent(planned)
        if (chosen := self._shared_keys(planned, extent)) is not None:
            return LayerCut(layer, "chosen", {}, Here(self._team, chosen=chosen))
        size, unit = self._section(planned, extent)
        sections = [(size, unit)] * (extent // size)
        out, into = (0, 1) if isinstance(layer, nn.Linear) else (1, 0)
        here, own = self._here(planned, size, unit)
        count = own * len(sections)
        if style in _ROWS:
            sizes = _sizes(planned, {"in_features": count, "nx": count})
            return LayerCut(layer, style, {"weight": (into, sections)}, here, sizes)
        slices: dict[str, Slicing] = {"weight": (out, sections)}
        if layer.bias is not None:
            slices["bias"] = (0, sections)
        return LayerCut(layer, style, slices, here, _sizes(planned, {"out_features": count, "nf": count}))

    def _shared_keys(self, planned: Planned, extent: int) -> tuple[int, ...] | None:
        """The outputs of a layer that gives heads of keys of which ranks have the same; None for any other."""
        heads = self._heads.get(id(planned.parent))
        if planned.style != "colwise" or heads is None or not heads.are_shared_keys(extent):
            return None
        return tuple(key * heads.width + at for key in heads.own_keys() for at in range(heads.width))

    def _cut_of_wrapper(self, planned: Planned) -> LayerCut:
        extent = _extent(planned)
        if (chosen := self._shared_keys(planned, extent)) is not None:
            here = Here(self._team, chosen=chosen, sections=[(extent, 1)])
            return LayerCut(planned.member, layers.GIVING_PART, {}, here)
        size, unit = self._section(planned, extent)
        here = replace(self._here(planned, size, unit)[0], sections=[(size, unit)] * (extent // size))
        if planned.style in _ROWS:
            return LayerCut(planned.member, layers.TAKING_PARTS, {}, here)
        first, own = here.share.first, here.share.own
        chosen = tuple(begin + at for begin in range(0, extent, size) for at in range(first, first + own))
        return LayerCut(planned.member, layers.GIVING_PART, {}, replace(here, chosen=chosen))

    def _cut_of_embedding(self, planned: Planned) -> LayerCut:
        layer, style = planned.layer, planned.style
        if style not in _EMBEDDING_STYLES or layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            raise UsageError(
                f'{planned.name} is an Embedding, and "{style}" is not available for it, nor max_norm, '
                "scale_grad_by_freq and sparse for one that is sliced: leave it out of the plan",
                code="tp-layer",
            )
        dimension = 0 if style in _ROWS else 1
        extent = layer.weight.shape[dimension]
        heads = self._heads.get(id(planned.parent)) if style == "colwise" else None
        unit = heads.count // heads.units if heads is not None and extent == heads.count else 1
        here, own = self._here(planned, extent, unit)
        slices: dict[str, Slicing] = {"weight": (dimension, [(extent, unit)])}
        if dimension == 1:
            return LayerCut(layer, style, slices, here, _sizes(planned, {"embedding_dim": own}))
        padding = layer.padding_idx
        if padding is not None and (first := here.share.first) <= padding < first + own:
            here = replace(here, padding=padding - first)
        return LayerCut(
            layer, style, slices, here, _sizes(planned, {"num_embeddings": own, "padding_idx": here.padding})
        )

    def _here(self, planned: Planned, size: int, unit: int) -> tuple[Here, int]:
        """A layer's knowledge of its slice, and how much of a section this rank has."""
        shares = [share(size // unit, self._degree, index).times(unit) for index in range(self._degree)]
        if shares[-1].own == 0:
            has = f"{planned.name} has {size} features in units of {unit}"
            raise refusal("some-without-slices", has, self._said)
        mine, sizes = shares[self._index], tuple(each.own for each in shares)
        return Here(self._team, sizes, mine, by_parent=planned.by_parent), mine.own

    def _section(self, planned: Planned, extent: int) -> tuple[int, int]:
        """The size of each section, which is cut apart from the others, and the unit that is never torn."""
        heads = self._heads.get(id(planned.parent))
        if planned.style == "rowwise" and id(planned.parent) not in self._members:
            heads = self._heads_near(planned, extent)
        split = whole_number(planned.parent, "split_size") if planned.style == "colwise" else None
        count = extent // split if split and extent % split == 0 else 1
        if planned.style == "packed_colwise":
            count = (
                2 if heads is None else max(1, extent // (heads.count * (heads.width or extent // 3 // heads.count)))
            )
        if extent % count:
            raise UsageError(
                f"{planned.name} has {extent} features, which are no {count} matrices side by side: take another style",
                code="tp-layer",
            )
        size = extent // count
        if heads is None or planned.style not in (*plans.COLUMNS, "rowwise"):
            return size, 1
        unit = heads.unit_of(planned.name, size)
        is_fused = planned.style == "colwise" and heads.width and size == (heads.count + 2 * heads.keys) * heads.width
        if is_fused and not planned.may_stay_whole and not type(heads.module).__module__.startswith("transformers."):
            raise UsageError(
                f'{planned.name} gives queries, keys and values in one: say "packed_colwise" where they lie side by '
                "side; where they lie by heads, leave it out of the plan",
                code="tp-layer",
            )
        return size, unit

    def _heads_near(self, planned: Planned, extent: int) -> Heads | None:
        """The heads whose results a layer takes that does not lie in their module, but beside it."""
        near = planned.place.rpartition(".")[0]
        found = [
            heads
            for key, place in self._places.items()
            if (heads := self._heads[key]) is not None
            and place.rpartition(".")[0] == near
            and heads.width is not None
            and heads.count * heads.width == extent
        ]
        return found[0] if len(found) == 1 else None


def _sizes(planned: Planned, sizes: dict[str, int | None]) -> dict[str, int | None]:
    """The sizes that a layer has from now on. One with a forward of its own that takes and gives wholes sees those of
    the whole."""
    takes_or_gives_parts = planned.style in (*plans.COLUMNS, "rowwise") and not (
        planned.style == "rowwise" and isinstance(planned.layer, nn.Embedding)
    )
    return sizes if takes_or_gives_parts or not layers.has_own_forward(planned.layer) else {}


def _gives_parts(planned: Planned) -> bool:
    return planned.style in plans.COLUMNS and is_linear(planned.layer)


def _extent(planned: Planned) -> int:
    """How many features there are of what is cut."""
    is_row = planned.style in _ROWS
    out, into = (0, 1) if isinstance(planned.layer, nn.Linear) else (1, 0)
    return planned.layer.weight.shape[into if is_row else out]
