# SPDX-License-Identifier: Apache-2.0
"""The position in the random numbers of a job with the key `seed`. The states of optimizers carry it, as what everybody
saves and loads besides the model."""

import warnings
from collections.abc import Mapping
from typing import Any

from lamina.errors import UsageError, refusal
from lamina.job import current

_KEY = "_lamina_rng_step"  # in a state, where torch's optimizers look at no key but their own


def rng_step() -> int:
    """How many steps have drawn random numbers, in this job and those that it goes on with: with the key `seed`, that
    says what the next one draws. Saved in the states of optimizers.

    Errors:
        UsageError: without `seed`, where torch.get_rng_state() says; inside a step function.
    """
    return _seeded("rng_step()").seeded_steps


def set_rng_step(steps: int) -> None:
    """Goes on with the random numbers of a job after so many steps; on every rank alike.

    Args:
        steps: what `rng_step()` was.

    Errors:
        UsageError: no such number; without `seed`, where torch.set_rng_state() says; inside a step function.
    """
    session = _seeded("set_rng_step()")
    if type(steps) is not int or steps < 0:
        raise UsageError(f"set_rng_step() takes a number of steps, not {steps!r}")
    session.seeded_steps = steps


def set_rng_seed(seed: int) -> None:
    """Seeds the random numbers of every microbatch from the next step on, as the key `seed` does from the first. For a
    seed that is only known in the job, as one that a rank draws; on every rank alike.

    Args:
        seed: a number, 0 to 2^63 - 1.

    Errors:
        UsageError: no such number; inside a step function.
    """
    session = current.outside_step("set_rng_seed()").session
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise UsageError(f"set_rng_seed() takes a whole number, 0 to 2^63 - 1, not {seed!r}")
    session.set_seed(seed)


def with_steps(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer, and with it where the random numbers are."""
    steps = current.session().seeded_steps if current.is_initialized() else None
    return state if steps is None or not state else state | {_KEY: steps}


def taken_from(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of an optimizer alone; the random numbers go on where it says."""
    seeded = current.is_initialized() and current.session().seeded_steps is not None
    if seeded and _KEY in state:
        current.session().seeded_steps = state[_KEY]
    elif seeded and current.session().seeded_steps == 0 and current.session().rank == 0:
        warnings.warn(
            "the state of an optimizer was loaded that was saved without `seed`: the random numbers of this job begin "
            "with those of its first step; set_rng_step() says otherwise",
            stacklevel=4,
        )
    return state if _KEY not in state else {key: value for key, value in state.items() if key != _KEY}


def check(job: current.Job) -> None:
    """Before a step: says once that a loaded model begins with the random numbers of a first step."""
    loaded, job.loaded = job.loaded, False
    if loaded and job.session.seeded_steps == 0 and job.session.rank == 0:
        warnings.warn(
            "a state was loaded into the model, and with `seed` its steps draw the random numbers of a first step: to "
            "go on with a training, load its optimizer's state_dict() too, or use set_rng_step()",
            stacklevel=5,
        )


def _seeded(what: str) -> Any:
    session = current.outside_step(what).session
    if session.seeded_steps is None:
        raise refusal("no-seed", what)
    return session
