# SPDX-License-Identifier: Apache-2.0
"""The first step of a job, compared with the plain model: see [Note: step check] in lamina/session/step_check.h."""

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lamina import _lamina
from lamina.job import current
from lamina.modules.tree import ModuleTree
from lamina.torch_patches import module_call
from lamina.tracing.sandbox import Call, alias, copied, put_stand_ins, undisturbed
from lamina.util import pytree
from lamina.util.told import tell


class StepCheck:
    """Runs the first microbatch plainly on world rank 0, and has all ranks compare theirs with it."""

    def __init__(self, job: current.Job):
        self._session = job.session
        self._plain: _Plain | None = None
        self._over = False

    def run_plainly(self, tree: ModuleTree, call: Call, generator: torch.Tensor) -> None:
        """Calls the model, before it is cut, as the body of a step does whose generator is in that state. Afterwards
        everything is as before."""
        plain = _Plain(tree, call)
        try:
            plain.run_forward(generator)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            tell(f"verify_steps: the plain model could not be run, and nothing is compared: {why}")
        else:
            self._plain = plain

    def end_step(self) -> None:
        """Compares, after the first step; collective over the world.

        Errors:
            UsageError: the step is not that of the plain model; on all ranks.
        """
        if self._over:
            return
        self._over = True
        plain, self._plain = self._plain, None
        if plain is not None:
            try:
                plain.run_backward(self._session.gradients_of_model)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                tell(f"verify_steps: gradients are not compared, for the plain backward failed: {why}")
                plain.run.forget_gradients()
        _lamina.compare_step(self._session, None if plain is None else plain.run)


class _Plain:
    """A microbatch of the model before it is cut: its tensors have stand-ins, which keep their values.

    Attributes:
        run: the recording.
    """

    def __init__(self, tree: ModuleTree, call: Call):
        self.run = _lamina.PlainRun(tree.names)
        self._tree, self._call = tree, call
        self._stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id, with whose it is
        self._returned: list[torch.Tensor] = []

    def run_forward(self, generator: torch.Tensor) -> None:
        """Calls the model."""
        with self._in_place():
            args, kwargs = copied((self._call.args, self._call.kwargs), alias)
            torch.set_rng_state(generator)
            self._returned = pytree.tensors(self._call.of(self._tree.root, args, kwargs))

    def run_backward(self, gradients: list[torch.Tensor | None]) -> None:
        """Runs the backward, with gradients of what the model returned. It may call modules again."""
        returned, self._returned = self._returned, []
        pairs = zip(returned, gradients, strict=False)
        reached = [(output, gradient) for output, gradient in pairs if gradient is not None and output.requires_grad]
        if reached:
            with self._in_place():
                torch.autograd.backward(*map(list, zip(*reached, strict=True)))

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        tree, call = self._tree, self._call
        with undisturbed(tree.root, call) as reach, _values_kept(reach.tensors), call.surroundings():
            put_stand_ins(tree.root, self._stand_in)
            with _lamina.AsInBody(), _recorded(tree, self.run):
                yield

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._stand_ins:
            copy = tensor.detach().clone()  # the memory goes with the cut
            is_parameter = isinstance(tensor, nn.Parameter)
            self._stand_ins[id(tensor)] = (tensor, nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy)
        return self._stand_ins[id(tensor)][1]


@contextmanager
def _values_kept(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Gives those of these tensors that are written their values back."""
    strided = [each for each in tensors if each.layout is torch.strided]
    here = [each for each in strided if not each.is_meta and not _lamina.is_released(each)]
    kept = [(each, each.detach().clone()) for each in here]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


@contextmanager
def _recorded(tree: ModuleTree, plain: _lamina.PlainRun) -> Iterator[None]:
    """Calls of modules of the tree are recorded, in the streams of random numbers that they have in a step."""

    def begin(node: int, _remote: bool, given: tuple) -> _lamina.HookedCall:
        return plain.begin(node, pytree.tensors(given))

    filled = tree.filled()
    streamed = itertools.compress(tree.modules, [number in filled.starting_stream for number in filled.ids])
    hooked = {id(module): functools.partial(begin, node) for node, module in enumerate(tree.modules)}
    with module_call.replaced(list(streamed), hooked):
        yield


def begin(job: current.Job) -> None:
    """Has the first step of a job compared, where its configuration says so."""
    if not job.session.checks_step:
        return
    if job.pipelined:
        job.step_check = StepCheck(job)
    elif job.session.rank == 0:
        tell("verify_steps: the model is not cut over ranks, and nothing is compared")


current.when_it_begins(begin)
