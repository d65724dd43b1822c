# SPDX-License-Identifier: Apache-2.0
"""The copies of a model that read different data: their gradients are averaged, their buffers kept alike.

[Note: pass] A backward pass is one call of a step function in which a backward was called, or, outside step functions,
one outermost backward that reaches a parameter. The gradients are averaged after every `backward_passes_per_step`-th,
until then they accumulate on each replica. The counter goes on over the life of the model.

[Note: join] Replicas may run out of data at different times. In `join` every reduction begins with a roll call: each
says whether it still trains. One that has left the context answers on, with no gradients of its own, until all have.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from lamina import _lamina, nest
from lamina.comm_hooks import CommHook, reduction
from lamina.errors import DesyncError, Error, TimeoutError, UsageError
from lamina.groups import ProcessGroups


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
        self._passes = passes
        self._bucket_bytes = bucket_bytes
        self._broadcast_buffers = broadcast_buffers
        self._everyone = list(range(session.group_size("dp")))
        self._hook: Callable | None = None  # that reduces a bucket, in the place of the mean
        self._roll_call: Callable[[bool], list[int]] | None = None  # in `join`
        self._by_everyone = True  # sums are divided by the number of all replicas, trained they or not
        self._done = 0
        self._in_step = False
        self._passed = False  # there was a backward in this step, or gradients were accumulated in this backward
        self._awaiting = False  # the end of this backward will call us
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @contextmanager
    def step(self) -> Iterator[Callable[[], bool]]:
        """Around a step: what it yields tells whether a backward was called in it so far."""
        self._in_step, self._passed = True, False
        before = self._session.backwards()
        try:
            yield lambda: self._passed or self._session.backwards() != before
        finally:
            self._in_step = False

    def note_backward(self) -> None:
        """A backward begins."""
        self._passed = self._passed or self._in_step

    def note_forward(self, output: Any) -> None:
        """The model has returned `output`. A backward through it is one, checkpoints in the model that run backwards of
        their own included: it reaches the output first. With several partitions a step counts its backwards."""
        if self._partitions > 1:
            return
        if not self._in_step and torch._C._current_graph_task_id() < 0:
            self._passed = self._awaiting = False  # a backward that failed has left them
        if torch.is_grad_enabled():
            nest.map_tensors(self._notice_backward, output)

    def finish_pass(self) -> None:
        """Ends a backward pass, see [Note: pass]; collective over the replicas."""
        self._done += 1
        if self._done % self._passes == 0:
            self._reduce(self._roll_call(True) if self._roll_call else self._everyone)

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
        present = self._everyone

        def roll_call(trains: bool) -> list[int]:
            nonlocal present
            answers = torch.zeros(len(self._everyone), dtype=torch.int64)
            answers[self._session.group_rank("dp")] = trains
            with self._collectively() as group:
                _lamina.sum_over_replicas(self._session, group, answers, "counting the replicas that train")
            there = answers.nonzero().flatten().tolist()
            if throws and 0 < len(there) < len(self._everyone):
                gone = sorted(set(self._everyone) - set(there))
                raise UsageError(f"join: replicas {gone} have run out of data, and throw_on_early_termination is set")
            present = there or present
            return there

        self._roll_call, self._by_everyone = roll_call, by_everyone
        try:
            yield
            while there := roll_call(False):
                self._shadow(there)
            with self._collectively() as group:
                for names in ("named_parameters", "named_buffers"):
                    _lamina.broadcast_buffers(self._session, group, self._own(names), present[-1])
        finally:
            self._roll_call, self._by_everyone = None, True

    def _shadow(self, present: list[int]) -> None:
        """Takes part in a reduction of others, without gradients."""
        kept = [(parameter, parameter.grad) for _, parameter in self._own("named_parameters")]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            self._reduce(present)
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def _reduce(self, present: list[int]) -> None:
        parameters = self._own("named_parameters")
        with self._collectively() as group:
            if self._hook is not None:
                _lamina.reduce_gradients(self._session, group, parameters, self._bucket_bytes, self._hook)
            else:
                divisor = len(self._everyone if self._by_everyone else present)
                _lamina.average_gradients(self._session, group, parameters, self._bucket_bytes, divisor)
            if self._broadcast_buffers:
                _lamina.broadcast_buffers(self._session, group, self._own("named_buffers"), present[0])

    @contextmanager
    def _collectively(self) -> Iterator[torch.distributed.ProcessGroup]:
        try:
            yield self._groups.get("dp")
        except BaseException as error:
            # Lamina's errors end a collective, as when the others have closed the group, except the one that comes when
            # it takes too long; after that, an interrupt, or an error of a hook it may wait for ever.
            self._groups.stuck |= isinstance(error, (TimeoutError, DesyncError)) or not isinstance(error, Error)
            raise

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
