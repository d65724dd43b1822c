# SPDX-License-Identifier: Apache-2.0
"""The first steps of a job, compared with the plain model: see [Note: step check] in lamina/session/step_check.h."""

import functools
import math
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
from lamina.tensor_parallel import layers, regions
from lamina.torch_patches import backwards
from lamina.tracing.sandbox import Call
from lamina.util import pytree
from lamina.util.told import tell
from lamina.verification import values
from lamina.verification.plain_model import PlainModel
from lamina.verification.values import Values

Edge = tuple[Any, int]  # a node of a graph, and the number of what it made


class StepCheck(parts.StepCheck):
    """Has the ranks that lead run the first microbatch of each of the first steps plainly, and all ranks compare theirs
    with it. It goes with the last of these steps.

    Attributes:
        see `parts.StepCheck`.
    """

    is_due = True

    def __init__(self, job: current.Job):
        self._job, self._session = job, job.session
        self._left = job.session.config.verify_steps
        self._forget()
        self._told: set[str] = set()
        self._has_room: bool | None = None  # not known yet
        self._undo = ExitStack()
        job.on_end.callback(self._undo.close)

    def _forget(self) -> None:
        self._plain: PlainModel | None = None
        self._values: Values | None = None
        self._outputs: dict[int, Edge] = {}  # what the model's call returned, by its number, in the graph
        self._reached: set[Edge] = set()  # of these, those that backwards of the step reach first
        self._gradients: dict[int, torch.Tensor] = {}  # that came there
        self._slicings: dict[str, layers.Slicing] = {}  # of parameters whose gradients are recorded
        self._beside: set[str] = set()  # parameters that the step uses outside of the call

    @property
    def leads(self) -> bool:
        """True where this rank calls the plain model."""
        return self._session.leads and self._takes_batch

    @property
    def sees_calls(self) -> bool:
        """True in the microbatch that is compared."""
        microbatch = _lamina.microbatch()
        return (self.microbatch if microbatch < 0 else microbatch) == 0

    @property
    def _takes_batch(self) -> bool:
        """True where no other rank of the TP_GROUP calls the plain model with the same batch."""
        return self._session.group_rank("tp") == 0 or not self._session.config.prescaled_batch

    def look_for_room(self, root: nn.Module) -> None:
        """Before a step: gives up where the whole model has no room on some rank that leads. Collective over the world
        in the first step."""
        if self._has_room is None:
            there = [each for _, each in named_tensors(root) if each.device.type == "cpu"]
            slicings = layers.slicings(root)
            shapes = {
                id(each): layers.unsliced(each.shape, slicings[id(each)]) for each in there if id(each) in slicings
            }
            size = sum(math.prod(shapes.get(id(each), each.shape)) * each.element_size() for each in there)
            self._has_room = _lamina.has_room_for_plain(self._session, size)
            if not self._has_room:
                if self._session.leads:
                    self._tell_once(f"there is no room for the plain model of {size:,} bytes and its gradients")
                self._end()

    def take_values(self, root: nn.Module, model: PartitionedModel | None) -> None:
        """A step begins: the ranks that lead get values for the plain model, which is not cut yet where there is no
        `model`. Collective over the world in the step that cuts it, then over the copy and its sharding group."""
        self._undo.close()  # of a step that has failed
        self._forget()
        if model is not None:
            self._values = values.of_owners(model, self._takes_batch)
        elif not any(map(is_delayed, root.parameters())):
            self._values = values.of_first(self._session, root)

    def run_plainly(self, root: nn.Module, called: tuple[Call, torch.Tensor] | None) -> None:
        """On a rank that leads: calls the model as the body of a step does, with that call and that state of its
        generator. Afterwards everything is as before."""
        given, self._values = self._values, None
        if called is None:
            self._tell_once("the step calls no model, or a part of it before the model")
            return
        if any(map(is_delayed, root.parameters())):
            self._tell_once("values of parameters are made only as the model is cut")
            return
        call, generator = called
        self._leave_out_of(pytree.tensors((call.args, call.kwargs)))
        try:
            plain = PlainModel(self._session, ModuleTree(root), call, given)
            if given is not None:
                plain.run.leave_out(given.otherwise_hooked(root))
            plain.run_forward(generator)
        except Exception as error:
            self._tell_once(f"the plain model could not be run: {type(error).__name__}: {error}")
        else:
            self._plain = plain

    def begin_step(self, model: PartitionedModel) -> None:
        """The model is cut: from now on gradients of this rank's parameters are recorded."""
        in_turns = regions.parameters(model.tree.root)
        slicings = layers.slicings(model.tree.root)
        own = [
            (name, each)
            for name, each in named_tensors(model.tree.root)
            if isinstance(each, nn.Parameter) and model.owns(name) and id(each) not in in_turns
        ]
        self._slicings = {name: slicings[id(each)] for name, each in own if id(each) in slicings}
        self._session.begin_checked_step(own)
        backwards.install(self.see_backward, self._undo)

    def see_outputs(self, output: Any) -> None:
        """Takes what the call returned to the body that `run_plainly` had a call of."""
        for number, tensor in enumerate(pytree.tensors(output)):
            if tensor.grad_fn is not None and _edge(tensor) not in self._outputs.values():
                self._outputs[number] = _edge(tensor)
                tensor.register_hook(functools.partial(self._see_gradient, self._gradients, number))
            elif tensor.requires_grad:  # a parameter, which may get more than what comes by the call
                self._beside |= {name for name, each in self._named() if each is tensor}

    def see_backward(self, tensors: Iterable[torch.Tensor]) -> None:
        """A body begins a backward of these."""
        if self._outputs and self.sees_calls:
            self._reached |= self._leave_out_of(tensors)

    def end_step(self) -> None:
        """Compares; collective over the world. After the last step that is compared everything of it is gone.

        Errors:
            UsageError: the step is not that of the plain model; on all ranks.
        """
        self._undo.close()
        plain, self._plain = self._plain, None
        self._left -= 1
        try:
            with self._job.life.unrouted():
                if plain is not None:
                    self._run_backward(plain)
            _lamina.compare_step(self._session, None if plain is None else plain.run, self._slicings)
        finally:
            self._forget()
            if self._left == 0:
                self._end()

    def _run_backward(self, plain: PlainModel) -> None:
        plain.run.leave_out(self._beside)
        try:
            gradients = self._gradients_of_model()
            if gradients is None:
                self._tell_once("the step uses a result, and what the model made of it", "gradients are not")
                plain.run.forget_gradients()
            else:
                plain.run_backward(gradients)
        except Exception as error:
            self._tell_once(f"the plain backward failed: {type(error).__name__}: {error}", "gradients are not")
            plain.run.forget_gradients()
        plain.run.end()

    def _end(self) -> None:
        self._job.step_check = parts.StepCheck()
        _lamina.end_checks(self._session)
        self._job.routing.forget_hooks()

    def _gradients_of_model(self) -> dict[int, torch.Tensor] | None:
        """Gradients that the step gives what the model returned, by its number; None where they are not known apart
        from those that come of the model's own use of it. The engine knows them where the model's call made it."""
        kept = self._session.gradients_of_model
        known = {number: each for number, each in enumerate(kept) if each is not None}
        handed_on = {
            number: edge
            for number, edge in self._outputs.items()
            if number not in known and edge in self._reached and number in self._gradients
        }
        for edge in handed_on.values():
            if _ends_of(self._reached - {edge}, {edge})[0]:
                return None
        return known | {number: self._gradients[number] for number in handed_on}

    def _leave_out_of(self, tensors: Iterable[torch.Tensor]) -> set[Edge]:
        """Parameters that these come from, other than by the model's call, have gradients that are not its. Returns
        where they come from that."""
        names = {id(parameter): name for name, parameter in self._named()}
        given = [_edge(each) for each in tensors if isinstance(each, torch.Tensor) and each.grad_fn is not None]
        ends, leaves = _ends_of(given, set(self._outputs.values()))
        self._beside |= {names[id(leaf)] for leaf in leaves if id(leaf) in names}
        return ends

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self._job.model.module.named_parameters())

    @staticmethod
    def _see_gradient(gradients: dict[int, torch.Tensor], number: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            before = gradients.get(number)
            gradients[number] = gradient.detach() if before is None else before + gradient.detach()

    def _tell_once(self, why: str, what: str = "nothing is") -> None:
        key = f"{what} {why}"
        if key not in self._told:
            self._told.add(key)
            tell(f"verify_steps: {what} compared, for {why}")


def _edge(tensor: torch.Tensor) -> Edge:
    return tensor.grad_fn, tensor.output_nr


def _ends_of(edges: Iterable[Edge], ends: set[Edge]) -> tuple[set[Edge], list[torch.Tensor]]:
    """Returns those of `ends` that a graph from these edges reaches, and its leaves. It goes no further there."""
    left, seen, found, leaves = list(edges), set(), set(), []
    while left:
        edge = left.pop()
        if edge in ends:
            found.add(edge)
            continue
        node, _ = edge
        if node not in seen:
            seen.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                leaves.append(leaf)
            left += [following for following in node.next_functions if following[0] is not None]
    return found, leaves


def begin(job: current.Job) -> None:
    """Has the first steps of a job compared, where its configuration says so."""
    if not job.session.checks_step:
        return
    if job.session.can_check_step:
        job.step_check = StepCheck(job)
    elif job.session.rank == 0:
        tell(
            "verify_steps: nothing is compared, for the layout takes no model apart, over partitions, slices or shards"
        )


current.when_it_begins(begin)
