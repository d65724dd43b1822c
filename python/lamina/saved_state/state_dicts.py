# SPDX-License-Identifier: Apache-2.0
"""The state of a model whose parts live on several ranks: as one dictionary, and in parts.

[Note: partial] A partial dictionary holds what one partition owns, of sliced parameters this rank's slices, and of
sharded ones this rank's shards. It says so under the key `_smp_is_partial`. It also knows the partition, the shard and
the slice that saved it, and how many there were.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError, refusal
from lamina.model import shards
from lamina.model.partitioned import PartitionedModel, packed, unpacked
from lamina.model.places import Place, own_and_shapes, places_of, replaced, stand_in
from lamina.tensor_parallel import slicing

PARTIAL = "_smp_is_partial"  # its value is whether the dictionary is partial
# A place, as lamina/topology/saved_place.h has it; in the metadata of a model's dictionary.
SAVED_BY = "_lamina_saved_by"
_SHARDS, _SLICES = 3, 5  # where it says how many there were
_EXTRA_STATE = nn.modules.module._EXTRA_STATE_KEY_SUFFIX


class ModelState:
    """The state of a partitioned model, for all ranks of one pipeline.

    Args:
        partitioned: who owns what of the model.
    """

    def __init__(self, partitioned: PartitionedModel):
        self._partitioned = partitioned
        self._module = partitioned.tree.root
        self._session = partitioned.session

    def local(self) -> OrderedDict[str, Any]:
        """Returns what this rank owns, as a partial dictionary."""
        state = self._own(as_slices=True)
        for name, parameter in self._sharded().items():
            state[name] = parameter.ds_tensor.detach().clone()
        state._metadata[SAVED_BY] = self._session.saved_place(of_shards=True)
        state[PARTIAL] = True
        return state

    def of_partition(self) -> OrderedDict[str, Any]:
        """Returns what this partition owns, of sharded parameters all, of sliced ones this rank's slice; a partial
        dictionary where there are several partitions, or slices. Collective over the sharding group."""
        state = self._own(as_slices=True)
        if self._place()[1] > 1 or self._session.group_size("tp") > 1:
            state._metadata[SAVED_BY] = self._session.saved_place(of_shards=False)
            state[PARTIAL] = True
        return state

    def whole(self, gather_to_rank0: bool = False) -> OrderedDict[str, Any]:
        """The whole state on every rank, or else on the first alone; collective."""
        own, reads_all = self._own_or_error()
        gets_it = not gather_to_rank0 or self._session.group_rank("one_copy") == 0
        if reads_all:
            state = self._of_all_values(own)
            return state if gets_it else OrderedDict()
        state = OrderedDict(self._partitioned.gathered(dict(own), gather_to_rank0))
        if not gets_it:
            return OrderedDict()
        state._metadata = own._metadata
        return state

    def load(self, state_dict: Mapping[str, Any], strict: bool, same_partition_load: bool) -> Any:
        """Loads what this rank owns out of a dictionary, full or partial. Collective: nothing is written on any rank
        unless it fits on all."""
        given = self._for_this_rank(state_dict, same_partition_load)
        saved = tuple(saved_by(state_dict) or ())
        as_slices = saved[_SLICES:] > (1,)
        sharded = self._sharded() if saved[_SHARDS : _SHARDS + 1] > (1,) else {}
        of_shards = {name: value for name, value in given.items() if name in sharded}
        given = _copy(given, leave=of_shards)
        # Hooks after loading look at the values, which a rehearsal does not have.
        calls_back = any(part._load_state_dict_post_hooks for part in self._module.modules())
        checked = None if calls_back else self._agree(self._rehearse(given, as_slices), strict, of_shards)
        if of_shards:
            shards.load(self._partitioned.sharding, [(sharded[name], value) for name, value in of_shards.items()])
        loaded = self._load_own(given, as_slices)
        return checked or self._agree((loaded.missing_keys, loaded.unexpected_keys, ""), strict, of_shards)

    def _own_or_error(self) -> tuple[OrderedDict[str, Any], bool]:
        """Returns what this rank owns, and whether hooks or modules of some rank made entries of what others own. An
        error of one rank is every rank's."""
        own, failure = OrderedDict(), None
        try:
            own = self._own()
        except Exception as error:
            failure = error
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        reads_all = any(isinstance(value, torch.Tensor) and value.is_meta for value in own.values())
        found = self._session.all_gather("one_copy", (text, reads_all))
        if failure is not None:
            raise failure
        if error := next((text for text, _ in found if text), ""):
            raise UsageError(f"state_dict() has failed on another rank: {error}", code="state-failed")
        return own, any(each for _, each in found)

    def _of_all_values(self, own: OrderedDict[str, Any]) -> OrderedDict[str, Any]:
        """The state dict that the plain model makes, with all values on each rank for the moment."""
        rows = self._partitioned.tensors()
        with shards.gathered_parameters(self._module.parameters()):
            mine = {name: each.detach().clone() for name, each, owner in rows if owner == self._place()[0]}
        values = self._partitioned.gathered(mine)
        extra = {name: value for name, value in own.items() if name.endswith(_EXTRA_STATE)}
        extra = self._partitioned.gathered(extra)
        names = {id(tensor): name for name, tensor, _ in rows}
        modules = (part for part in self._module.modules() if not isinstance(part, torch.jit.ScriptModule))
        places = [place for module in modules for place in places_of(module)]
        with replaced([(held, key, values[names[id(each)]]) for held, key, each in places if id(each) in names]):
            state = self._module.state_dict()
        state.update(extra)
        return state

    # Returns what this rank owns.

    def _sharded(self) -> dict[str, nn.Parameter]:
        """The sharded parameters here, under each of their names."""
        named = self._module.named_parameters(remove_duplicate=False)
        return {
            name: parameter
            for name, parameter in named
            if shards.number_of(self._partitioned.sharding, parameter) is not None
        }

    def _place(self) -> tuple[int, int]:
        return self._partitioned.partition, self._session.group_size("partitions")

    def _own(self, as_slices: bool = False) -> OrderedDict[str, Any]:
        """A state dict with what this rank owns. Collective over those who hold parts of that: shards, and but for
        `as_slices` slices."""
        gathered = shards.gathered_parameters(self._module.parameters())
        with own_and_shapes(self._partitioned), gathered, self._wholes(as_slices):
            state = self._module.state_dict()
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    own = torch.ops.lamina.tp_own(value) if _lamina.where_cut(value) is not None else value
                    is_sharded = shards.number_of(self._partitioned.sharding, value) is not None
                    state[name] = own.clone() if is_sharded else own
        for name in [name for name in state if not self._partitioned.owns(name)]:
            del state[name]
        return state

    def _load_own(self, given: OrderedDict[str, Any], as_slices: bool) -> Any:
        """torch's load_state_dict of what this rank owns; of what others own it has the shapes."""
        owns = self._partitioned.owns
        foreign_extra = [name for name in given if name.endswith(_EXTRA_STATE) and not owns(name)]
        own = _copy(given, leave=foreign_extra)
        for name, value in own.items():
            own[name] = value if owns(name) or not isinstance(value, torch.Tensor) else stand_in(value)
        gathered = shards.gathered_parameters(self._module.parameters(), write_back=True)
        with own_and_shapes(self._partitioned), gathered, self._wholes(as_slices, write_back=True):
            missing, unexpected = self._module.load_state_dict(own, strict=False)
        return nn.modules.module._IncompatibleKeys([name for name in missing if owns(name)], unexpected + foreign_extra)

    def _wholes(self, as_slices: bool, write_back: bool = False) -> AbstractContextManager[None]:
        return nullcontext() if as_slices else slicing.wholes(self._module, self._session, write_back)

    # Partial dictionaries.

    def _for_this_rank(self, state_dict: Mapping[str, Any], same_partition_load: bool) -> OrderedDict[str, Any]:
        """The dictionary; in the place of a partial one that holds not just what this rank owns, all partial ones."""
        given, own = _copy(state_dict, leave=(PARTIAL,)), self._own(as_slices=True).keys()
        foreign = saved_elsewhere(state_dict, self._session)
        mine = (is_partial(state_dict), foreign, given.keys() == own, self._difference(given, own, state_dict))
        partial, origins, fits, differences = zip(*self._session.all_gather("one_copy", mine), strict=True)
        if any(origins):
            raise UsageError(next(text for text in origins if text), code="state-other-ranks")
        if not any(partial):
            return given
        require_one_kind(partial, "state dict")
        if all(fits):
            return given
        if same_partition_load:
            raise UsageError(next(text for text in differences if text), code="state-other-cut")
        metadata = given._metadata
        gathered = self._session.gather_state({name: packed(value) for name, value in given.items()})
        given = OrderedDict((name, unpacked(value)) for name, value in gathered.items())
        given._metadata = metadata
        return given

    def _difference(self, given: Mapping[str, Any], own: Any, state_dict: Mapping[str, Any]) -> str:
        saved, here = saved_by(state_dict), self._place()
        origin = _nth(*saved[:2]) if saved else "another partition"
        texts = [
            f"it has {name}, which lives on {self._partitioned.home_of(name)}" for name in given if name not in own
        ][:1]
        texts += [f"it lacks {name}, which lives here" for name in own if name not in given][:1]
        if not texts:
            return ""
        return (
            f"same_partition_load=True, but the state dict of {origin} is not that of {_nth(*here)}, as the model is "
            f"cut now: {', '.join(texts)}. Load it without same_partition_load"
        )

    # Before anything is written.

    def _rehearse(self, given: OrderedDict[str, Any], as_slices: bool) -> tuple[list[str], list[str], str]:
        """(missing, unexpected, error) of loading into tensors without memory."""
        extra = {name for name in given if name.endswith(_EXTRA_STATE)}
        light = _copy(given, leave=extra)
        for name, value in light.items():
            light[name] = stand_in(value) if isinstance(value, torch.Tensor) else value
        with replaced(_stand_ins(self._module)):
            try:
                missing, unexpected = self._load_own(light, as_slices)
            except Exception as error:
                return [], [], str(error)
        return [name for name in missing if name not in extra], unexpected, ""

    def _agree(self, found: tuple[list[str], list[str], str], strict: bool, given: Iterable[str] = ()) -> Any:
        """torch's answer for the whole model: missing is what its owner misses and was not `given` otherwise,
        unexpected what no rank takes."""
        found = ([name for name in found[0] if name not in given], *found[1:])
        missing, unexpected, errors = zip(*self._session.all_gather("one_copy", found), strict=True)
        if any(errors):
            raise UsageError(next(error for error in errors if error))
        missing = list(dict.fromkeys(itertools.chain(*missing)))
        unexpected = [name for name in unexpected[0] if all(name in others for others in unexpected)]
        if strict and (missing or unexpected):
            homes = "".join(f"; {name} lives on {self._partitioned.home_of(name)}" for name in missing[:3])
            raise UsageError(
                f"state_dict does not fit the model: missing {missing}, unexpected {unexpected}{homes}",
                code="state-names",
            )
        return nn.modules.module._IncompatibleKeys(missing, unexpected)


def is_partial(state_dict: Mapping[str, Any]) -> bool:
    """See [Note: partial]."""
    return bool(state_dict.get(PARTIAL, False))


def require_one_kind(partial: Sequence[bool], what: str) -> None:
    """Raises UsageError where some partitions, not all, were given a partial one."""
    if any(partial) and not all(partial):
        raise refusal("mixed-states", partial.index(True), what, partial.index(False))


def saved_elsewhere(state_dict: Mapping[str, Any], session: _lamina.Session) -> str:
    """Says what is wrong with a partial dictionary of a model of more or fewer partitions; "" when nothing is."""
    return session.why_elsewhere(saved_by(state_dict) or ())


def without_mark(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict as the plain model takes it."""
    return _copy(state_dict, leave=(PARTIAL,)) if PARTIAL in state_dict else state_dict


def saved_by(state_dict: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The place of the rank that saved a partial dictionary, where it says so."""
    holder = state_dict if SAVED_BY in state_dict else getattr(state_dict, "_metadata", None) or {}
    return holder.get(SAVED_BY) if is_partial(state_dict) else None


def _nth(partition: int, partitions: int) -> str:
    return f"partition {partition} of {partitions}"


def _copy(state_dict: Mapping[str, Any], leave: Any = ()) -> OrderedDict[str, Any]:
    copy = OrderedDict((name, value) for name, value in state_dict.items() if name not in leave)
    copy._metadata = dict(getattr(state_dict, "_metadata", None) or {})
    return copy


def _stand_ins(root: nn.Module) -> list[Place]:
    """Tensors without memory for the places of all parameters and buffers."""
    return [
        (held, name, stand_in(tensor))
        for module in root.modules()
        for held, name, tensor in places_of(module)
        if tensor is not None
    ]
