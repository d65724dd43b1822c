# SPDX-License-Identifier: Apache-2.0
"""The copies of a model that read different data: their gradients are averaged, their buffers kept alike.

[Note: pass] A backward pass is one call of a step function in which a backward was called, or, outside step functions,
one outermost backward that reaches a parameter. All replicas meet in each (`_lamina.Passes`): where the step of one has
failed it fails on all. The gradients are averaged after every `backward_passes_per_step`-th, until then they accumulate
on each replica. The counter goes on over the life of the model.

Of a step that fails it is not known whether it would have had a backward: it counts as a pass unless it was entered
without gradients (torch.no_grad). Outside step functions a backward that fails is one: at once where the model's own
`backward` was called, else when the model is called next, if it had reached the model.

[Note: join] Replicas may run out of data at different times. In `join` one that has left the context meets the others
on, with no gradients of its own, until all have left.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from lamina import _lamina
from lamina.data_parallel.comm_hooks import CommHook, reduction
from lamina.errors import DesyncError, Error, RemoteError, TimeoutError, UsageError
from lamina.job.groups import ProcessGroups
from lamina.util import pytree


class Replicas:
    """This rank's part of the model, and the same part on the other replicas.

    Args:
        session, groups: of the job.
        module: the model.
        owns: whether this rank owns what has a name; asked once the model is partitioned.
        passes: backward passes per reduction, see [Note: pass].
        bucket_bytes: about how much of the gradients travels at a time.
        broadcast_buffers: whether buffers get the values of the first replica that trains after each reduction.
    """

    def __init__(
        self,
        session: _lamina.Session,
        groups: ProcessGroups,
        module: nn.Module,
        owns: Callable[[str], bool],
        passes: int,
        bucket_bytes: int,
        broadcast_buffers: bool,
    ):
        self._session = session
        self._groups = groups
        self._module = module
        self._owns = owns
        self._partitions = session.group_size("pp")
        self._passes = _lamina.Passes(session)
        self._passes_per_reduction = passes
        self._bucket_bytes = bucket_bytes
        self._broadcast_buffers = broadcast_buffers
        self._everyone = list(range(session.group_size("dp")))
        self._hook: Callable | None = None  # that reduces a bucket, in the place of the mean
        self._by_everyone = True  # sums are divided by the number of all replicas, trained they or not
        self._throws = False  # the first replica that leaves `join` is an error of all
        self._present = self._everyone  # those that trained in the latest pass that any trained in
        self._done = 0
        self._in_step = False
        self._passed = False  # there was a backward in this step, or gradients were accumulated in this backward
        self._awaiting = False  # the end of this backward will call us
        self._met = False  # the replicas have met in this backward
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @contextmanager
    def step(self) -> Iterator[Callable[[], bool]]:
        """Around a step: what it yields tells whether a backward was called in it so far."""
        self._fail_backward()
        self._count_call()
        trains = torch.is_grad_enabled()
        self._in_step, self._passed = True, False
        before = self._session.backwards()
        try:
            yield lambda: self._passed or self._session.backwards() != before
        except BaseException as error:
            if trains:
                self._passes.fail(error)
            raise
        finally:
            self._in_step = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward of the model's own."""
        self._passed = self._passed or self._in_step
        self._met = False
        try:
            yield
        except BaseException as error:
            if not self._in_step and not self._met:
                self._passed = self._awaiting = False
                self._passes.fail(error)
            raise

    def note_call(self) -> None:
        """The model is called."""
        if self._partitions == 1 and not self._in_step and torch._C._current_graph_task_id() < 0:
            self._fail_backward()
            self._count_call()

    def note_forward(self, output: Any) -> None:
        """The model has returned `output`. A backward through it is one, checkpoints in the model that run backwards of
        their own included: it reaches the output first. With several partitions a step counts its backwards."""
        if self._partitions == 1 and torch.is_grad_enabled():
            pytree.map_tensors(self._notice_backward, output)

    def finish_pass(self) -> None:
        """Ends a backward pass, see [Note: pass]; collective over the replicas.

        Errors:
            The error of a replica whose pass failed.
        """
        self._met = True
        self._reduce_nth(self._meet(True))

    @property
    def hooked(self) -> bool:
        """Whether a communication hook takes the place of averaging."""
        return self._hook is not None

    def set_hook(self, state: Any, hook: CommHook) -> None:
        """From now on `hook` makes of a bucket's gradients what they become."""
        if self.hooked:
            raise UsageError("register_comm_hook() is called once")
        self._hook = reduction(state, hook)

    @contextmanager
    def join(self, by_everyone: bool, throws: bool) -> Iterator[None]:
        """See [Note: join]; collective over the replicas at its end.

        Args:
            by_everyone: whether sums of gradients are divided by the number of all replicas, not of those that train.
            throws: whether the first replica that leaves is an error of all.
        """
        self._by_everyone, self._throws, self._present = by_everyone, throws, self._everyone
        try:
            yield
            while present := self._meet(False):
                self._shadow(present)
        except BaseException as error:
            self._passes.fail(error)  # this replica will not answer the others
            raise
        finally:
            self._by_everyone, self._throws = True, False
        self._together(self._take_over, self._present[-1])

    def _meet(self, trains: bool) -> list[int]:
        """Comes to the next pass: the replicas that train in it."""
        present = self._passes.meet(trains)
        self._present = present or self._present
        if self._throws and 0 < len(present) < len(self._everyone):
            gone = sorted(set(self._everyone) - set(present))
            raise UsageError(f"join: replicas {gone} have run out of data, and throw_on_early_termination is set")
        return present

    def _shadow(self, present: list[int]) -> None:
        """Takes part in a reduction of others, without gradients."""
        kept = [(parameter, parameter.grad) for _, parameter in self._own("named_parameters")]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            self._reduce_nth(present)
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def _reduce_nth(self, present: list[int]) -> None:
        self._done += 1
        if self._done % self._passes_per_reduction == 0:
            self._together(self._reduce, present)

    def _reduce(self, group: torch.distributed.ProcessGroup, present: list[int]) -> None:
        parameters = self._own("named_parameters")
        if self._hook is not None:
            self._passes.reduce_gradients(group, parameters, self._bucket_bytes, self._hook)
        else:
            divisor = len(self._everyone if self._by_everyone else present)
            self._passes.average_gradients(group, parameters, self._bucket_bytes, divisor)
        if self._broadcast_buffers:
            self._passes.broadcast_buffers(group, self._own("named_buffers"), present[0])

    def _take_over(self, group: torch.distributed.ProcessGroup, root: int) -> None:
        """All get what the replica `root` has."""
        for names in ("named_parameters", "named_buffers"):
            self._passes.broadcast_buffers(group, self._own(names), root)

    def _together(self, compute: Callable[[torch.distributed.ProcessGroup, Any], None], argument: Any) -> None:
        """Calls `compute` with torch's group of the replicas, all of which do so."""
        try:
            self._passes.together(lambda: compute(self._groups.get("dp"), argument))
        except BaseException as error:
            # Lamina's errors end a collective, as when the others have closed the group, except those that come from
            # another replica, or when it takes too long or would never end; after these, an interrupt, or an error of a
            # hook it may wait for ever.
            left = isinstance(error, TimeoutError | DesyncError | RemoteError) or not isinstance(error, Error)
            self._groups.stuck = self._groups.stuck or left
            raise

    def _count_call(self) -> None:
        if torch.is_grad_enabled() and self._module.training:
            self._passes.note_call()

    def _fail_backward(self) -> None:
        """Notices that the backward before this failed: its end has not called us."""
        failed, self._passed, self._awaiting = self._awaiting, False, False
        if failed:
            self._passes.fail(Error("a backward outside of step functions failed, on this replica of the model"))

    def watch(self) -> None:
        """From now on a backward that nobody announces is noticed, by the gradients it leaves in the parameters."""
        self.unwatch()
        for _, parameter in self._own("named_parameters"):
            frozen = not parameter.requires_grad
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(True)  # for a hook; one that is frozen now may be trained later
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._accumulated))
                parameter.requires_grad_(not frozen)

    def unwatch(self) -> None:
        """Ends `watch`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _own(self, names: str) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, tensor in getattr(self._module, names)() if self._owns(name)]

    def _notice_backward(self, output: torch.Tensor) -> torch.Tensor:
        def reached(gradient: torch.Tensor) -> None:
            self._await_end()

        if output.requires_grad:
            output.register_hook(reached)
        return output

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self._passed = True
        self._await_end()

    def _await_end(self) -> None:
        """In a backward: has its end call us."""
        if not self._in_step and not self._awaiting:
            self._awaiting = True
            Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._awaiting = False
        if self._passed:
            self._passed = False
            self.finish_pass()
