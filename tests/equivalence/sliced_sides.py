# SPDX-License-Identifier: Apache-2.0
"""The two sides of a case with sliced layers, and what is compared besides: the state in the plain model, and a
checkpoint in another layout."""

import copy
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from equivalence import random_sides
from equivalence.random_comparison import compare, compare_exactly
from equivalence.random_sides import TIMEOUT_S, place_by_hand, world_of_one
from equivalence.random_training import Trained, batches, build, evaluation_body, states
from equivalence.sharded_cases import make_optimizer
from equivalence.sliced_cases import CHECKPOINTS, DRAWS, SlicedCase
from equivalence.sliced_parts import mark, sliced_parts
from torch import nn

import lamina


def check(case: SlicedCase) -> list[str]:
    """The differences between the two ways of training, on this rank; an empty list is the promise kept."""
    wrong: list[str] = []
    with torch.random.fork_rng():
        theirs = reference(case)
        ours = distributed(case, wrong)
    return wrong + compare(case, ours, theirs)


def reference(case: SlicedCase) -> Trained:
    """A plain loop, or lamina in a world of one, which alone knows a microbatch's random numbers."""
    if DRAWS not in case.traits and "dropout" not in case.traits:
        return random_sides.plain(case, partial(make_optimizer, case))
    with world_of_one(), _job(case, microbatches=case.microbatches * case.copies):
        return _train(*_made(case), case)


def distributed(case: SlicedCase, wrong: list[str]) -> Trained:
    layout = {"tensor_parallel_degree": case.tp, "partitions": case.partitions, "ddp": True}
    with _folder(case.moved is not None) as folder:
        sharding = {
            "sharded_data_parallel_degree": case.sharding,
            "sdp_param_persistence_threshold": case.threshold,
            "sdp_gradient_clipping": 1e9,
        }
        with _job(case, **layout, **sharding):
            model, optimizer = _made(case)
            trained = _train(model, optimizer, case)
            state = copy.deepcopy(model.state_dict())
            kept = states(optimizer)
            wrong += _loaded(case, state, trained.parameters)
            if case.moved is not None:
                lamina.save_checkpoint(folder, "one")
        if case.moved is not None:
            layout |= dict(zip(("tensor_parallel_degree", "partitions"), case.moved, strict=True))
            with _job(case, **layout, prescaled_batch=True):
                model, optimizer = _made(case, placed_by_hand=False)
                lamina.resume_from_checkpoint(folder)
                _look(case, model)
                wrong += compare_exactly(state | kept, model.state_dict() | states(optimizer), "in the other layout:")
    return trained


@contextmanager
def _job(case: SlicedCase, **config: Any) -> Iterator[None]:
    manual = {"auto_partition": False, "default_partition": 0} if case.placed_by_hand else {}
    keys = {
        "microbatches": case.microbatches,
        "active_microbatches": case.active_microbatches,
        "schedule": case.schedule,
        "seed": case.number,
        "optimize": case.optimize,
        "prescaled_batch": case.prescaled,
        "timeout_s": TIMEOUT_S,
    }
    lamina.init(**(keys | manual | config))
    try:
        yield
    finally:
        lamina.shutdown()


def _made(case: SlicedCase, placed_by_hand: bool | None = None) -> tuple[Any, Any]:
    """The model and its optimizer."""
    model = build(case)
    if CHECKPOINTS in case.traits:
        draw = random.Random(case.number)
        for module in list(model.modules())[1:]:
            if draw.random() < 0.2 and not getattr(module, "inplace", False):  # it changes what would be kept
                lamina.set_activation_checkpointing(module)
    if case.placed_by_hand if placed_by_hand is None else placed_by_hand:
        regions = [] if case.prescaled else [part.modules() for part in sliced_parts(model)]
        place_by_hand(model, case.number, regions)
    mark(model)
    model = lamina.distribute(model)
    return model, lamina.DistributedOptimizer(make_optimizer(case, model.parameters()))


def _train(model: Any, optimizer: Any, case: SlicedCase) -> Trained:
    trained = random_sides.train_here(case, model, optimizer, lambda: _wholes(model))
    trained.others |= states(optimizer)
    return trained


def _wholes(model: Any) -> list[tuple[str, nn.Parameter]]:
    """This partition's parameters, whole, with their gradients; collective over the ranks that have parts of them."""
    found = []
    for name, parameter in model.local_named_parameters():
        made = nn.Parameter(lamina.get_full_parameter(parameter), parameter.requires_grad)
        made.grad = lamina.get_full_gradient(parameter)
        found.append((name, made))
    return found


def _look(case: SlicedCase, model: Any) -> None:
    """Partitions the model, which is done in the first step."""

    @lamina.step
    def evaluate(model, x, y, tokens):
        with torch.no_grad():
            return evaluation_body(model, x, y, tokens)

    evaluate(model, **{name: tensor.to(lamina.device()) for name, tensor in batches(case)[0].items()})


def _loaded(case: SlicedCase, state: dict, parameters: dict[str, torch.Tensor]) -> list[str]:
    """Says what is not the same in a plain model that loads the state."""
    plain = build(case)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.fill_(torch.nan)
    plain.load_state_dict(state)
    values = dict(plain.named_parameters())
    return [
        f"state of {name} in the plain model" for name in parameters if not torch.equal(values[name], parameters[name])
    ]


@contextmanager
def _folder(is_wanted: bool) -> Iterator[str]:
    """A folder that all ranks see."""
    if not is_wanted:
        yield ""
        return
    lamina.init(timeout_s=TIMEOUT_S)
    name = lamina.allgather(tempfile.mkdtemp() if lamina.rank() == 0 else "", lamina.WORLD)[0]
    lamina.shutdown()
    try:
        yield name
    finally:
        shutil.rmtree(name, ignore_errors=True)
