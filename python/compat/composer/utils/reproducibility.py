# SPDX-License-Identifier: Apache-2.0
from composer.paths import others
from lamina.composer.reproducibility import (
    MAX_SEED,
    configure_deterministic_mode,
    get_random_seed,
    get_rng_state,
    load_rng_state,
    seed_all,
)

__getattr__ = others(__name__)

__all__ = [
    "MAX_SEED",
    "configure_deterministic_mode",
    "get_random_seed",
    "get_rng_state",
    "load_rng_state",
    "seed_all",
]
