# SPDX-License-Identifier: Apache-2.0
"""Differences between the two sides of a random case, on this rank.

See [Note: equal] in cases.py. Under autocast to bfloat16 the two sides round differently wherever gradients are added
in another order, or a cast weight is kept for several calls. With 8 bits kept, only the outputs of the first call and
the first gradients are compared, to what some roundings make of them.
"""

import traceback

import torch
from equivalence.cases import difference
from equivalence.random_cases import RandomCase
from equivalence.random_sides import distributed, reference
from equivalence.random_training import Trained

TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "autocast": 0.05}


def check(case: RandomCase) -> list[str]:
    """The differences between the two ways of training, on this rank; an empty list is the promise kept."""
    try:
        theirs = reference(case)
    except Exception:
        return [f"the reference is ill-defined: {traceback.format_exc()}"]
    if "twice" not in case.traits:
        return compare(case, distributed(case), theirs)
    ours, again = (distributed(case, deterministic_server=True) for _ in range(2))
    return compare(case, ours, theirs) + compare_runs(ours, again)


@torch.no_grad()
def compare(case: RandomCase, ours: Trained, theirs: Trained) -> list[str]:
    kind = next(iter(case.traits & {"float32", "autocast"}), "float64")
    tolerance = TOLERANCE[kind]
    wrong = []
    # A difference of roundings in the first call grows with every update.
    for at in range(len(ours.outputs) if kind == "float64" else 1):
        here, there = ours.outputs[at], theirs.outputs[at]
        names = [name for name in here if is_number(here[name]) or is_number(there[name])]
        numbers, numbers_there = ({name: side[name] for name in names} for side in (here, there))
        wrong += difference(numbers, numbers_there, tolerance, f"call {at}:")
        if kind != "autocast":
            rest = {name: value for name, value in here.items() if name not in names}
            wrong += compare_exactly(rest, there, f"call {at}:")
    wrong += difference(ours.first_gradients, theirs.first_gradients, tolerance, "first gradient of")
    if kind != "autocast":
        # AdamW divides a gradient by its size. So the rounding of an entry far below the largest, which counts for
        # little in the gradient, moves its parameter by as much as any (case 1596: 2e-5, and 2e-16 in float64).
        loose = 10 if kind == "float32" else 1
        wrong += difference(ours.parameters, theirs.parameters, loose * tolerance, "parameter")
    if kind == "float64":
        wrong += difference(ours.gradients, theirs.gradients, tolerance, "gradient of")
        wrong += difference(ours.buffers, theirs.buffers, tolerance, "buffer")
        wrong += difference(ours.others, theirs.others, tolerance, "")
    return wrong


def compare_runs(ours: Trained, again: Trained) -> list[str]:
    """Lists what is not the same, bit by bit, in a second run."""
    wrong = []
    for what, here in vars(ours).items():
        there = vars(again)[what]
        for part, other in zip(here, there, strict=True) if isinstance(here, list) else [(here, there)]:
            wrong += compare_exactly(part, other, f"second run, {what}:")
    return wrong


def compare_exactly(ours: dict, theirs: dict, what: str) -> list[str]:
    pairs = ((name, value, theirs.get(name)) for name, value in ours.items())
    return [f"{what} {name}: {here} here, {there} there" for name, here, there in pairs if not identical(here, there)]


def identical(a, b) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def is_number(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
