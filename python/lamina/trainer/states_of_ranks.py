# SPDX-License-Identifier: Apache-2.0
"""States that ranks have of their own, in a checkpoint that holds rank 0's of what is alike on all."""

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lamina.job.messages import allgather
from lamina.job.ranks import WORLD, rank, size
from lamina.util.told import tell


def differing(states: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The states that are not the same on all ranks: what each rank has, in their order. All ranks call it; what is
    alike is not sent."""
    digests = allgather({name: _digest(state) for name, state in states.items()}, WORLD)
    names = sorted(set().union(*digests))
    others = [name for name in names if len({each.get(name) for each in digests}) > 1 or digests[0].get(name) is None]
    if not others:
        return {}
    everyone = allgather({name: states.get(name) for name in others}, WORLD)
    return {name: [each[name] for each in everyone] for name in others}


def own_of(path: str, saved: Mapping[str, Any], of_ranks: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The states that this rank goes on with: of `saved`, rank 0's, and its own where there are as many ranks. Else a
    line names them.

    Args:
        path: of the checkpoint, for that line.
        saved: states of rank 0, by name.
        of_ranks: those of all ranks, of what was not alike.
    """
    own = {name: each[rank()] for name, each in of_ranks.items() if len(each) == size()}
    if rank() == 0 and (others := sorted(of_ranks.keys() - own.keys())):
        before, names = len(of_ranks[others[0]]), ", ".join(name.rpartition(".")[0] for name in others)
        tell(f"{path}: each of {before} ranks had a state of its own of {names}: on {size()} ranks it is rank 0's")
    return {**saved, **own}


def are_alike(states: Sequence[Any]) -> bool:
    """Tells whether all of them are the same."""
    digests = set(map(_digest, states))
    return len(digests) == 1 and None not in digests


class _Hash:
    """A file of which the digest is kept alone."""

    def __init__(self) -> None:
        self.of_all = hashlib.blake2b()

    def write(self, data: Any) -> None:
        self.of_all.update(data)


class _Pickler(pickle.Pickler):
    """Writes tensors by their values, and what is there twice twice: equal objects alike in all processes."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        values = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tuple, ((str(obj.dtype), tuple(obj.shape), values),)


def _digest(state: Any) -> bytes | None:
    """A digest of a state; None of one that has none, for it holds itself or cannot be pickled."""
    found = _Hash()
    pickler = _Pickler(found)
    pickler.fast = True
    try:
        pickler.dump(state)
    except Exception:
        return None
    return found.of_all.digest()
