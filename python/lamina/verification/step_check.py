# SPDX-License-Identifier: Apache-2.0
"""The first steps of a job, compared with the plain model: see [Note: step check] in lamina/session/step_check.h. What
is compared, and how, is for the engine to say."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.deferred_init.delayed import is_delayed
from lamina.job import current, parts
from lamina.model.partitioned import PartitionedModel, named_tensors
from lamina.modules.tree import ModuleTree
from lamina.script_state.generators import Streams
from lamina.tensor_parallel import layers, regions
from lamina.torch_patches import backwards
from lamina.tracing.sandbox import Call
from lamina.util import pytree
from lamina.verification.plain_model import PlainModel

_PLAIN = (bool, int, float, complex, str, type(None), torch.Tensor)

Named = tuple[str, torch.Tensor]


class StepCheck(parts.StepCheck):
    """Tells the engine's check what a step does. It goes with the last of the steps that are compared.

    Args:
        job: whose steps they are.
        check: the engine's.

    Attributes:
        see `parts.StepCheck`.
    """

    is_due = True

    def __init__(self, job: current.Job, check: _lamina.StepCheck):
        self._job, self._check = job, check
        self._undo = ExitStack()
        job.on_end.callback(self._undo.close)

    @property
    def leads(self) -> bool:
        return self._check.leads

    @property
    def sees_calls(self) -> bool:
        return self._check.sees_calls

    def look_for_room(self, root: nn.Module) -> None:
        self._check.look_for_room(_rows(root, named_tensors(root)))
        self._end_if_over()

    def take_values(self, root: nn.Module, model: PartitionedModel | None) -> None:
        self._undo.close()  # of a step that has failed
        if model is not None:
            own = [(name, each) for name, each in named_tensors(root) if model.owns(name)]
            attributes = {} if model.session.leads else _attributes(model)
            self._check.take_values(_rows(root, own), model.sharding, _hooked(own), attributes)
        elif not any(map(is_delayed, root.parameters())):
            self._check.take_first_values(_rows(root, named_tensors(root)))

    def run_plainly(self, root: nn.Module, called: tuple[Call, Streams] | None) -> None:
        if called is None:
            self._check.run_plainly(None, [], [], [], set())
        elif any(map(is_delayed, root.parameters())):
            self._check.leave_out("values of parameters are made only as the model is cut")
        else:
            tree, (call, streams) = ModuleTree(root), called
            parameters, given = list(root.named_parameters()), pytree.tensors((call.args, call.kwargs))
            self._check.run_plainly(PlainModel(tree, call, streams), tree.names, given, parameters, _hooked(parameters))

    def begin_step(self, model: PartitionedModel) -> None:
        root = model.tree.root
        in_turns = regions.parameters(root)
        own = [(name, each) for name, each in root.named_parameters() if model.owns(name) and id(each) not in in_turns]
        self._check.begin_step(_rows(root, own))
        backwards.install(self.see_backward, self._undo)

    def see_outputs(self, output: Any) -> None:
        self._check.see_outputs(pytree.tensors(output))

    def see_backward(self, tensors: Iterable[torch.Tensor]) -> None:
        self._check.see_backward([each for each in tensors if isinstance(each, torch.Tensor)])

    def end_step(self) -> None:
        """Compares; collective over the world. After the last step that is compared everything of it is gone.

        Errors:
            UsageError: the step is not that of the plain model; on all ranks.
        """
        self._undo.close()
        try:
            with self._job.life.unrouted():
                self._check.run_backward()
            self._check.end_step()
        finally:
            self._end_if_over()

    def _end_if_over(self) -> None:
        if self._check.is_over:
            self._job.step_check = parts.StepCheck()
            self._job.routing.forget_hooks()


def _rows(root: nn.Module, named: Iterable[Named]) -> list[tuple[str, torch.Tensor, layers.Slicing | None]]:
    """Tensors of a model, with how they are sliced."""
    slicings = layers.slicings(root)
    return [(name, each, slicings.get(id(each))) for name, each in named]


def _hooked(named: Iterable[Named]) -> set[str]:
    """Names of the parameters that have hooks here."""
    return {name for name, each in named if isinstance(each, nn.Parameter) and each._backward_hooks}


def _attributes(model: PartitionedModel) -> dict[str, Any]:
    """Plain attributes of the modules of this rank, which their forward may have set."""
    torchs = nn.Module().__dict__.keys()
    return {
        f"{name}.{attribute}": value
        for name, module, owner in zip(model.tree.names, model.tree.modules, model.owners, strict=True)
        if owner == model.partition
        for attribute, value in vars(module).items()
        if attribute not in torchs and type(value) in _PLAIN and "." not in attribute
    }


def begin(job: current.Job) -> None:
    """Has the first steps of a job compared, where its configuration says so."""
    if (check := _lamina.StepCheck.of_job(job.session)) is not None:
        job.step_check = StepCheck(job, check)


current.when_it_begins(begin)
