# SPDX-License-Identifier: Apache-2.0
from lamina.trainer.reproducibility import (
    MAX_SEED,
    configure_deterministic_mode,
    get_random_seed,
    get_rng_state,
    load_rng_state,
    seed_all,
)

__all__ = [
    "MAX_SEED",
    "configure_deterministic_mode",
    "get_random_seed",
    "get_rng_state",
    "load_rng_state",
    "seed_all",
]
