# SPDX-License-Identifier: Apache-2.0
"""Layers of which this rank has a slice, and the modules around them: see [Note: slicing plan].

A sliced layer stays the same object, with the same parameters, and gets another class: the one it had, with another
forward. So names, hooks and what the script keeps of it stay as they are.
"""

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError
from lamina.libraries import hugging_face
from lamina.tensor_parallel import dropout
from lamina.tensor_parallel.classes import made
from lamina.tensor_parallel.dropout import Parts, SlicedDropout, State
from lamina.tensor_parallel.shares import Share, share
from lamina.util.settings import setting

# As `_lamina.Slicing`.
Slicing = tuple[int, list[tuple[int, int]]]

_KEYS_AT = 1  # of what caches have [samples, heads, positions, features]
_POSITIONS_AT = 1  # of states [samples, positions, features]
_SLICES = "_lamina_slices"  # by the parameter's name
_HERE = "_lamina_here"  # a Here
_PARTS = "_lamina_parts"  # of a module around sliced layers: a Parts
_GIVES = "_lamina_gives"  # of one in it: this rank's part of what it gives, or None for one that takes parts
_PLACE = "_lamina_place"  # of a stack whose activations lie in parts of positions, and of what is in it: a Place
TURNS = "_lamina_turns"  # of a region: its Turns
KEPT = "_lamina_kept"  # of a region: its Kept
REGION = "_lamina_region"  # of a sliced layer: the name of its region
PROOF = "_lamina_proof"  # of a module whose calls are proven, see [Note: proofs] in proof/proofs.py
PROVEN_AS = "_lamina_proven_as"  # of such a module: its name
PROVEN_IN = "_lamina_proven_in"  # of a sliced layer in one: a ProvenRegions, its own name and that of the module
HAS_HEADS = "_lamina_has_heads"  # of classes of attention that compute with the heads of a module around them
_STYLE = "_lamina_sliced_by"  # of a sliced layer: its style
GIVING_PART, TAKING_PARTS = "whole, cut by columns", "whole, cut by rows"  # styles of wrappers
OF_WRAPPERS = (GIVING_PART, TAKING_PARTS)
_NOTHING = Share(0, 0, 0)
NOTES = (
    _SLICES,
    _HERE,
    _PARTS,
    _GIVES,
    _PLACE,
    TURNS,
    KEPT,
    REGION,
    PROVEN_AS,
    PROVEN_IN,
    PROOF,
    _STYLE,
)  # attributes of modules that compute with slices


@dataclass(frozen=True)
class Here:
    """A sliced layer's knowledge of its slice.

    Attributes:
        team: the name of the ranks that have the others.
        sizes: of what is cut, how much each rank has.
        share: this rank's part of it.
        chosen: of outputs that all ranks have, those that are computed here, or given on; None for all.
        sections: of a wrapper, those of what is cut, as in slices of parameters.
        by_parent: whether the module around it has a part in the exchanges with other ranks.
        padding: the word of an embedding's slice that has no gradient.
    """

    team: str
    sizes: tuple[int, ...] = ()
    share: Share = _NOTHING
    chosen: tuple[int, ...] | None = None
    sections: list[tuple[int, int]] = field(default_factory=list)
    by_parent: bool = False
    padding: int | None = None


@dataclass(frozen=True)
class Place:
    """A rank's place in its team."""

    team: str
    index: int
    degree: int

    def positions(self, count: int) -> Share:
        """This rank's part of so many positions."""
        return share(count, self.degree, self.index)

    def cut(self, count: int) -> tuple[int, tuple[int, ...], str]:
        """The arguments of operators that cut states [samples, positions, features] by positions, after the first."""
        return _POSITIONS_AT, tuple(share(count, self.degree, index).own for index in range(self.degree)), self.team


class _ByColumns:
    """A layer that has some of the outputs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(_copied(self, input))


class _Gathered:
    """A layer that has some of the outputs, and gives all."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        here = self.__dict__[_HERE]
        is_differentiable = input.is_floating_point() or input.is_complex()
        output = super().forward(torch.ops.lamina.tp_copy(input, here.team) if is_differentiable else input)
        return torch.ops.lamina.tp_gather(output, output.dim() - 1, here.sizes, here.team)


class _ByRows:
    """A layer that has some of the inputs: what the ranks compute is added, and then the bias."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight if isinstance(self, nn.Linear) else self.weight.t()
        sum = torch.ops.lamina.tp_all_reduce(nn.functional.linear(input, weight), self.__dict__[_HERE].team)
        return sum if self.bias is None else sum + self.bias.to(sum.dtype)  # which autocast has chosen


class _OfReady(_ByColumns):
    """A column-parallel layer whose input was already copied to the team; the module around it reduces its gradient."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super(_ByColumns, self).forward(input)


class _ToPositions(_ByRows):
    """One that gives a part of positions."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight if isinstance(self, nn.Linear) else self.weight.t()
        place: Place = self.__dict__[_PLACE]
        product = nn.functional.linear(input, weight)
        sum = torch.ops.lamina.tp_reduce_scatter(product, *place.cut(product.shape[_POSITIONS_AT]))
        return sum if self.bias is None else sum + torch.ops.lamina.tp_copy(self.bias, place.team).to(sum.dtype)


class _SplitRows(_ByRows):
    """One to which all inputs are given."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        here = self.__dict__[_HERE]
        return super().forward(torch.ops.lamina.tp_scatter(input, input.dim() - 1, here.sizes, here.team))


class _Chosen:
    """A layer that is whole on all ranks, and computes some outputs on each: heads of keys, where these are fewer than
    ranks. Its gradients are added."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        here = self.__dict__[_HERE]
        chosen = torch.tensor(here.chosen, device=self.weight.device)
        weight = torch.ops.lamina.tp_copy(self.weight, here.team)
        weight = weight.index_select(0, chosen) if isinstance(self, nn.Linear) else weight.index_select(1, chosen).t()
        bias = None
        if self.bias is not None:
            bias = torch.ops.lamina.tp_copy(self.bias, here.team).index_select(0, chosen)
        return nn.functional.linear(_copied(self, input), weight, bias)


class _GivingPart:
    """A wrapper that is computed whole, and gives a part: see [Note: wrappers]."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, here = super().forward(*args, **kwargs), self.__dict__[_HERE]
        chosen = torch.tensor(here.chosen, device=output.device)
        return torch.ops.lamina.tp_copy(output, here.team).index_select(output.dim() - 1, chosen)


class _TakingParts:
    """A wrapper that is computed whole, and takes a part."""

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        here, mode = self.__dict__[_HERE], dropout.current()
        whole = torch.ops.lamina.tp_gather(input, input.dim() - 1, here.sizes, here.team)
        if mode is None:
            return super().forward(whole, *args, **kwargs)
        before = mode.state
        mode.state = before._replace(given=())  # what it drops is whole
        try:
            return super().forward(whole, *args, **kwargs)
        finally:
            mode.state = before


class _Words:
    """An embedding that has some of the words: the others' are zero here, and the ranks' are added. Words that none has
    are an error of torch's own, on all ranks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        here = self.__dict__[_HERE]
        own = input - here.share.first
        is_elsewhere = ((own < 0) | (own >= self.weight.shape[0])) & (input >= 0) & (input < sum(here.sizes))
        output = nn.functional.embedding(own.masked_fill(is_elsewhere, 0), self.weight, here.padding)
        output = output.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        return torch.ops.lamina.tp_all_reduce(output, here.team)


class _Columns:
    """An embedding that has some of the features."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


class _Replicated:
    """A layer that all ranks have, each for a part of what is computed: its gradients are added."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = [name for name, parameter in self._parameters.items() if parameter is not None]
        try:
            for name in names:  # found before parameters are
                self.__dict__[name] = torch.ops.lamina.tp_copy(self._parameters[name], self.__dict__[_HERE].team)
            return super().forward(*args, **kwargs)
        finally:
            for name in names:
                self.__dict__.pop(name, None)


class _Own:
    """A layer that computes with its slices, which are guarded for all others: see lamina/value/guarded.h."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _require_slices(self)
            regions, *names = self.__dict__.get(PROVEN_IN, (None,))
            if regions is not None:
                regions.note(*names)
            with _lamina.Unguarded():
                return super().forward(*args, **kwargs)
        lent = self.__dict__  # where attributes are found before parameters are
        try:
            for name in lent[_SLICES]:
                lent[name] = torch.ops.lamina.tp_own(self._parameters[name])
            return super().forward(*args, **kwargs)
        finally:
            for name in lent[_SLICES]:
                lent.pop(name, None)


def _slice_of(layer: nn.Module, name: str) -> nn.Parameter:
    if (parameter := layer._parameters.get(name)) is not None:
        return parameter
    raise UsageError(
        f"the {name} of a sliced {type(layer).__name__} is no parameter of it any more, as after pruning or a "
        "parametrization, which would measure a slice: do that before the model is wrapped, and leave it out of the "
        "plan",
        code="tp-away",
    )


def is_transformed() -> bool:
    """True inside a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _require_slices(layer: nn.Module) -> None:
    """UsageError where a parameter of a sliced layer has become something else than a slice, or torch.func transforms
    its call."""
    if is_transformed():
        raise UsageError(
            f"a sliced {type(layer).__name__} was called inside a transform of torch.func (grad, jvp, vmap), which the "
            "exchanges between ranks do not follow: use backward() or torch.autograd, or leave it out of the plan",
            code="step-transform",
        )
    here: Here = layer.__dict__[_HERE]
    for name, (dimension, sections) in layer.__dict__[_SLICES].items():
        parameter = _slice_of(layer, name)
        own, index = parameter.shape[dimension], 0 if here.sizes == () else here.share.own * len(sections)
        if index and own != index:
            raise UsageError(
                f"the {name} of a sliced {type(layer).__name__} has become {list(parameter.shape)}, and its part on "
                f"this rank has {index} along dimension {dimension}: write whole values by model.load_state_dict(), or "
                "in lamina.gathered_parameters([parameter], write_back=True)",
                code="tp-away",
            )


class _Around:
    """A module that computes with parts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _give_own_keys(self, (*args, *kwargs.values()))
        if not any(part.training for part in self.modules()):
            return super().forward(*args, **kwargs)
        with dropout.inside(self, self.__dict__[_PARTS], State()):
            return super().forward(*args, **kwargs)


class _Member:
    """A module in the one around, that gives parts or takes them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if (mode := dropout.current()) is None:
            return super().forward(*args, **kwargs)
        before = mode.state
        if self.__dict__[_GIVES] is not None:
            mode.state = before._replace(given=())  # to this one
        output = super().forward(*args, **kwargs)
        mode.state = _after(self, before)
        return output


class _BySteps:
    """A module of torch's that computes with weights of layers in it, unless it calls them: here it does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # torch takes the way of many steps then
            return super().forward(*args, **kwargs)
        with setting(False, torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled):
            return super().forward(*args, **kwargs)


_LINEAR = {
    "colwise": _ByColumns,
    "packed_colwise": _ByColumns,
    "colwise_gather_output": _Gathered,
    "rowwise": _ByRows,
    "rowwise_split_input": _SplitRows,
    "chosen": _Chosen,
    "replicated_with_grad_allreduce": _Replicated,
    GIVING_PART: _GivingPart,
    TAKING_PARTS: _TakingParts,
}
_BY_PARENT = {"colwise": _OfReady, "rowwise": _ToPositions}
_EMBEDDING = {
    "colwise": _Columns,
    "embedding_colwise": _Gathered,
    "colwise_gather_output": _Gathered,
    "rowwise": _Words,
    "embedding_rowwise": _Words,
    "replicated_with_grad_allreduce": _Replicated,
}
_GIVE_PARTS = (_ByColumns, _Chosen, _Columns, _GivingPart)


def become_sliced(layer: nn.Module, style: str, slices: dict[str, Slicing], here: Here) -> None:
    """Makes a layer one that computes with its slices."""
    if slices:
        layer.__dict__[_SLICES] = slices
    layer.__dict__[_HERE], layer.__dict__[_STYLE] = here, style
    kinds = _EMBEDDING if isinstance(layer, nn.Embedding) else _BY_PARENT if here.by_parent else _LINEAR
    kind, base = type(layer), _base_of(type(layer))
    if kind is base or style in OF_WRAPPERS or (not slices and here.chosen is None):
        layer.__class__ = with_other_forward(kinds[style], kind)
    else:
        layer.__class__ = with_other_base(kind, with_other_forward(kinds[style], base))
    if slices:
        layer.__class__ = with_other_forward(_Own, type(layer))


def has_own_forward(layer: nn.Module) -> bool:
    """True for a layer whose class computes something else than torch's Linear or Embedding, or transformers' Conv1D,
    that it is derived from."""
    return type(layer).forward is not _base_of(type(layer)).forward


def reaches_base(layer: nn.Module) -> bool:
    """False for a layer with a forward of its own that never calls the one of the class that it is derived from."""
    kinds = type(layer).__mro__
    above = kinds[: kinds.index(_base_of(type(layer)))]
    forwards = [vars(kind)["forward"] for kind in above if "forward" in vars(kind)]
    return all("__class__" in getattr(getattr(each, "__code__", None), "co_freevars", ()) for each in forwards)


def is_linear(layer: nn.Module) -> bool:
    """True for torch's Linear and transformers' Conv1D."""
    return isinstance(layer, nn.Linear) or any(map(_is_conv1d, type(layer).__mro__))


def style_of(layer: nn.Module) -> str | None:
    """The style of a sliced layer; None for any other."""
    return layer.__dict__.get(_STYLE)


def _is_conv1d(kind: type) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}" in (
        "transformers.pytorch_utils.Conv1D",
        "transformers.modeling_utils.Conv1D",
    )


def _base_of(kind: type) -> type:
    """The class among those that a layer is derived from whose forward its slices replace; itself for any other."""
    return next((each for each in kind.__mro__ if each in (nn.Linear, nn.Embedding) or _is_conv1d(each)), kind)


def become_around(
    module: nn.Module,
    heads: Share | None,
    keys: tuple[tuple[int, ...], int],
    members: list[tuple[nn.Module, Share | None]],
    team: str,
) -> None:
    """Makes a module one that computes with parts: some heads, with these of so many heads of keys, or features between
    these of its members. Attention in it that is lamina's own knows these heads."""
    for each in (module, *(part for part in module.modules() if getattr(type(part), HAS_HEADS, False))):
        each.__dict__[_PARTS] = Parts(heads, team, *keys)
    module.__class__ = with_other_forward(_Around, type(module))
    for member, gives in members:
        if _GIVES not in member.__dict__:
            member.__class__ = with_other_forward(_Member, type(member))
        member.__dict__[_GIVES] = gives


def _give_own_keys(module: nn.Module, given: Iterable[Any]) -> None:
    """Leaves this rank's heads of keys and values in caches that a module is given with all of them, as prefixes are
    that are learned."""
    parts: Parts = module.__dict__[_PARTS]
    number = module.__dict__.get("layer_idx")
    if not isinstance(number, int) or parts.keys == tuple(range(parts.all_keys)):
        return
    for layer in hugging_face.cached(given, number):
        for name in ("keys", "values"):
            whole = getattr(layer, name, None)
            if isinstance(whole, torch.Tensor) and whole.dim() == 4 and whole.shape[_KEYS_AT] == parts.all_keys:
                own = torch.tensor(parts.keys, device=whole.device)
                setattr(layer, name, torch.ops.lamina.tp_copy(whole, parts.team).index_select(_KEYS_AT, own))


def has_fast_path(module: nn.Module) -> bool:
    """True for a module of torch's that may pass by the layers in it."""
    return isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer | nn.MultiheadAttention)


def leave_fast_path(module: nn.Module) -> None:
    """From now on a module calls the layers in it."""
    module.__class__ = with_other_forward(_BySteps, type(module))


def divide_positions(stack: nn.Module, team: str, index: int, degree: int) -> None:
    """From now on the activations between the modules of a stack lie in parts of positions."""
    place = Place(team, index, degree)
    for part in stack.modules():
        part.__dict__[_PLACE] = place


def place_of(module: nn.Module) -> Place | None:
    """This rank's place in the team that has the other parts of positions of a stack; None where they are whole."""
    return module.__dict__.get(_PLACE)


def ready(module: nn.Module, given: torch.Tensor, positions: int | None = None) -> torch.Tensor:
    """The input of layers inside a module that are cut by columns, with all positions. Its gradients are added over the
    ranks.

    Args:
        given: the module's own input.
        positions: how many there are, where it has a part of them.
    """
    if (parts := module.__dict__.get(_PARTS)) is None:
        return given
    if positions is None:
        return torch.ops.lamina.tp_copy(given, parts.team)
    place: Place = module.__dict__[_PLACE]
    if (mode := dropout.current()) is not None:
        mode.state = mode.state._replace(positions=place.positions(positions))
    return torch.ops.lamina.tp_all_gather(given, *place.cut(positions))


# Calls of modules on other ranks, below a module that computes with parts.


def travelling(mode: SlicedDropout) -> tuple[tuple[int, ...], ...]:
    """The state of a call as it goes along with one of a module on another rank, below its module."""
    return tuple(astuple(share) for share in (*mode.state.given, mode.state.positions or _NOTHING))


def arrived(around: nn.Module, told: tuple[tuple[int, ...], ...]) -> AbstractContextManager[None]:
    """Inside, dropout is that of a call of `around` on another rank, of which `travelling` told."""
    *given, positions = (Share(*each) for each in told)
    return dropout.inside(around, around.__dict__[_PARTS], State(tuple(given), positions if positions.all else None))


def passed_by(mode: SlicedDropout, modules: Iterable[nn.Module]) -> None:
    """These modules have been called on another rank, in this order."""
    for module in modules:
        if _GIVES in module.__dict__:
            mode.state = _after(module, mode.state)
        elif not isinstance(module, _Around):  # whose call has a state of its own
            passed_by(mode, module.children())


def heads_here(module: nn.Module) -> Share | None:
    """The heads that a module has on this rank; None: all of them."""
    parts = module.__dict__.get(_PARTS)
    return None if parts is None else parts.heads


def takes_parts(module: nn.Module) -> bool:
    """True for a layer that is given a part of what there is, on each rank another."""
    return isinstance(module, _ByRows | _TakingParts) and not isinstance(module, _SplitRows)


def gives_parts(module: nn.Module) -> bool:
    """True for a layer that gives a part."""
    return isinstance(module, _GIVE_PARTS)


def works_on_parts(module: nn.Module) -> bool:
    """True for a layer that all ranks have, each for a part of what is computed."""
    return isinstance(module, _Replicated)


def is_sliced(module: nn.Module) -> bool:
    """True for a layer of which this rank computes a part."""
    return _HERE in module.__dict__


def slicing_of_activations(layer: nn.Module, given: bool) -> list[tuple[int, int]] | None:
    """The sections of the last dimension of what a sliced layer is given, or of what it gives; None: it is whole."""
    is_part = takes_parts(layer) if given else isinstance(layer, _ByColumns | _Columns)
    if isinstance(layer, _TakingParts):
        return layer.__dict__[_HERE].sections if given else None
    return layer.__dict__[_SLICES]["weight"][1] if is_part else None


def chosen_outputs(layer: nn.Module) -> tuple[list[int], int, str] | None:
    """The outputs that are computed here, of how many, and the team, of a layer of which ranks may have the same ones;
    None for any other."""
    here = layer.__dict__.get(_HERE)
    if isinstance(layer, _GivingPart):
        return list(here.chosen), sum(extent for extent, _ in here.sections), here.team
    if not isinstance(layer, _Chosen):
        return None
    return list(here.chosen), layer.weight.shape[0 if isinstance(layer, nn.Linear) else 1], here.team


def slicings(root: nn.Module) -> dict[int, Slicing]:
    """How the parameters under a module are sliced, by id(parameter)."""
    return {
        id(_slice_of(module, name)): slicing
        for module in root.modules()
        for name, slicing in module.__dict__.get(_SLICES, {}).items()
    }


def slicing_of(module: nn.Module, name: str) -> Slicing | None:
    """How one of a module's own parameters is sliced; None for one that is whole."""
    return module.__dict__.get(_SLICES, {}).get(name)


def whole_shape(module: nn.Module, name: str) -> list[int]:
    """The shape of the whole of which a parameter is a slice; empty where it is whole."""
    slicing = module.__dict__.get(_SLICES, {}).get(name)
    return [] if slicing is None else unsliced(_slice_of(module, name).shape, slicing)


def unsliced(shape: torch.Size, slicing: Slicing) -> list[int]:
    """The shape of the whole of which something of this shape is a slice."""
    dimension, sections = slicing
    return [*shape[:dimension], sum(extent for extent, _ in sections), *shape[dimension + 1 :]]


def _after(member: nn.Module, state: State) -> State:
    """The state of a call after that of a member."""
    gives = member.__dict__[_GIVES]
    return state._replace(given=() if gives is None else tuple(dict.fromkeys((*state.given, gives))))


def _copied(layer: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """The input of a layer whose gradients are added over the ranks: once for all layers of a module that are given the
    same, as queries, keys and values are."""
    mode, team = dropout.current(), layer.__dict__[_HERE].team
    if mode is None or not (input.requires_grad and torch.is_grad_enabled()):
        return torch.ops.lamina.tp_copy(input, team)
    version = 0 if torch.compiler.is_compiling() else input._version  # which a compiled graph does not know
    if mode.copied is None or mode.copied[0] is not input or mode.copied[1] != version:
        mode.copied = (input, version, torch.ops.lamina.tp_copy(input, team))
    return mode.copied[2]


@functools.cache
def with_other_base(kind: type, base: type) -> type:
    """The class of that name in which what `kind` calls of the class that it is derived from reaches `base` first."""
    return made(kind, (kind, base))


@functools.cache
def with_other_forward(mixin: type, kind: type) -> type:
    """The class of that name that does what `mixin` does around what it did."""
    return made(kind, (mixin, kind))
