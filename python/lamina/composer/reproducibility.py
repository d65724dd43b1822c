# SPDX-License-Identifier: Apache-2.0
"""Random numbers, and algorithms, that are the same again. A Trainer with a `seed` and `deterministic_mode` does this
itself, after the script has made its model."""

import importlib.util
import os
import random
import warnings
from typing import Any

import torch

from lamina.dist.collectives import all_gather_object
from lamina.dist.ranks import get_global_rank, get_world_size
from lamina.errors import ConfigError
from lamina.script_state import generators

MAX_SEED = 2**32 - 1  # numpy's


def require_seed(seed: Any) -> int:
    """The seed as it is.

    Errors:
        ConfigError: no whole number from 0 to `MAX_SEED`.
    """
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"Seed {seed!r} is invalid: it is a whole number, 0 to 2^32 - 1")
    return seed


def get_random_seed() -> int:
    """A new seed, which no generator of this process says."""
    return random.SystemRandom().randint(0, MAX_SEED)


def seed_all(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators of this process, on all devices.

    Errors:
        ConfigError: no whole number from 0 to `MAX_SEED`.
    """
    random.seed(require_seed(seed))
    torch.manual_seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(seed)


def configure_deterministic_mode() -> None:
    """Has torch take algorithms alone that give the same bits again, which are slower. On GPUs it comes before all
    else."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True


def get_rng_state() -> list[dict[str, Any]]:
    """The states of each rank's generators; every rank calls it."""
    return all_gather_object(generators.states())


def load_rng_state(rng_state_dicts: list[dict[str, Any]]) -> None:
    """Puts this rank's generators into the states that `get_rng_state` gave. Ranks that had none then keep theirs."""
    if len(rng_state_dicts) != get_world_size():
        warnings.warn(
            f"random generators of {len(rng_state_dicts)} ranks are given to {get_world_size()}: those of ranks that "
            "there are not are ignored, and ranks without any keep theirs",
            stacklevel=2,
        )
    for states in rng_state_dicts[get_global_rank() :][:1]:
        generators.put_states(states)
