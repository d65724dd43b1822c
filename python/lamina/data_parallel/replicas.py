# SPDX-License-Identifier: Apache-2.0
"""The copies of a model that read different data: what Python tells the engine's Reducer of their calls and backwards.

See [Note: backward pass] and [Note: join] in lamina/data_parallel/reducer.h.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.data_parallel.comm_hooks import CommHook, GradBucket
from lamina.job import current, groups, parts
from lamina.model.partitioned import PartitionedModel
from lamina.util import pytree


@dataclass(frozen=True)
class Averaging:
    """How gradients of a model are averaged: the arguments of a DistributedModel that say so, alike on all ranks."""

    backward_passes_per_step: int
    overlapping_allreduce: bool
    average_grads_across_microbatches: bool
    bucket_cap_mb: float
    broadcast_buffers: bool
    gradient_as_bucket_view: bool


class Replicas(parts.Replicas):
    """This rank's part of the model, and the same part on the other replicas.

    Args:
        job: that has the model.
        module: the model.
        partitioned: who owns what of it; asked once it is cut.
        averaging: how gradients are averaged.

    Attributes:
        accumulates: whether gradients may wait for a later pass: several to a reduction, or `no_sync`.
    """

    averages = True
    reducer: _lamina.Reducer

    def __init__(
        self,
        job: current.Job,
        module: nn.Module,
        partitioned: Callable[[], PartitionedModel],
        averaging: Averaging,
    ):
        session, process_groups = job.session, groups.of_job()
        session.order_turns()
        self._module = module
        self._partitioned = partitioned
        self._has_two = session.group_size("replicas") != session.group_size("same_parts")  # [Note: two reductions]
        self._partitions = session.group_size("partitions")
        self.accumulates = averaging.backward_passes_per_step > 1
        self._beside: list[torch.Tensor] = []
        me = weakref.ref(self)  # Python does not see through the engine: a circle would never be collected
        self.reducer = _lamina.Reducer(
            session,
            averaging.backward_passes_per_step,
            int(averaging.bucket_cap_mb * 2**20),
            averaging.broadcast_buffers,
            averaging.overlapping_allreduce and not session.config.deterministic_server,
            averaging.gradient_as_bucket_view,
            parameters=lambda: me()._own_parameters(scaled=False) + me()._named_beside(),
            buffers=lambda: me()._own("named_buffers"),
            scaled_batch=(lambda: me()._own_parameters(scaled=True)) if self._has_two else None,
        )
        reducer = self.reducer  # which may outlive the model
        process_groups.stuck = lambda: reducer.stuck
        job.closers.append(lambda at_exit: reducer.close() is None)
        job.on_end.callback(self._unwatch)

    @property
    def gradients_wait(self) -> bool:
        """As `parts.Replicas.gradients_wait`."""
        return self.reducer.accumulates

    @property
    def are_joining(self) -> bool:
        """As `parts.Replicas.are_joining`."""
        return self.reducer.joining

    def share_batches(self) -> None:
        """As `parts.Replicas.share_batches`."""
        self.reducer.share_batches()

    def see_batch(self, values: Any) -> None:
        """Looks at what the model is about to be trained on, before the first gradients are averaged."""
        if self.reducer.looks_at_batches and torch.is_grad_enabled():
            self.reducer.see_batch(pytree.tensors(values))

    def note_call(self) -> int:
        """The model is called. Returns the call's number."""
        return self.reducer.note_call(self._module.training) if self._partitions == 1 else 0

    def note_forward(self, call: int, output: Any) -> None:
        """Notes that the call has returned `output`. A backward through it is one, checkpoints in the model that run
        backwards of their own included: it reaches the output first. With several partitions a step counts its
        backwards."""
        if self._partitions > 1 or not torch.is_grad_enabled():
            return
        reached = [tensor for tensor in pytree.tensors(output) if tensor.requires_grad]
        for tensor in reached:
            tensor.register_hook(lambda _: self.reducer.await_backward(call))
        if not reached:
            self.reducer.forget_call(call)

    def set_hook(self, state: Any, hook: CommHook) -> None:
        """From now on `hook` makes of a bucket's gradients what they become."""
        me = weakref.ref(self)
        self.reducer.set_hook(lambda *bucket: me()._hook(*bucket))
        self._hook = lambda *bucket: hook(state, GradBucket(*bucket))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See [Note: backward pass]: backwards inside are held back."""
        self.reducer.hold_back()
        try:
            yield
        finally:
            self.reducer.release()

    @contextmanager
    def join(self, by_everyone: bool, throws: bool) -> Iterator[None]:
        """See [Note: join]; collective over the replicas at its end.

        Args:
            by_everyone: whether sums of gradients are divided by the number of all replicas, not of those that train.
            throws: whether the first replica that leaves is an error of all.
        """
        self.reducer.begin_join(by_everyone, throws)
        try:
            yield
        except BaseException as error:
            self.reducer.fail_join(error)
            raise
        self.reducer.end_join()

    def watch(self, parameters: list[torch.Tensor]) -> None:
        """From now on a backward that nobody announces is noticed, by the gradients it leaves in these parameters, and
        in those beside the model."""
        self.reducer.watch([*parameters, *self._beside])

    def let_go(self) -> None:
        """As `parts.Replicas.let_go`."""
        self.reducer.let_go()

    def complete(self, what: str) -> None:
        """As `parts.Replicas.complete`. UsageError where that is too early."""
        self.reducer.complete(what)

    def before_update(self) -> None:
        """As `parts.Replicas.before_update`."""
        self.reducer.before_update()

    def _unwatch(self) -> None:
        self.reducer.watch([])

    def add(self, beside: list[torch.Tensor]) -> None:
        """Has the gradients of parameters that are not the model's averaged, too."""
        known = set(map(id, self._beside))
        self._beside += [parameter for parameter in beside if id(parameter) not in known]

    def _named_beside(self) -> list[tuple[str, torch.Tensor]]:
        return [(f"beside the model, {number}", parameter) for number, parameter in enumerate(self._beside)]

    def _own_parameters(self, scaled: bool) -> list[tuple[str, torch.Tensor]]:
        own = self._own("named_parameters")
        if not self._has_two:
            return own
        table = self._partitioned().table
        return [(name, each) for name, each in own if (table.reduced_over(each) == "rdp") == scaled]

    def _own(self, names: str) -> list[tuple[str, torch.Tensor]]:
        """The buffers of this rank, with their names; sparse and quantised buffers stay each replica's own."""
        owns = self._partitioned().owns
        own = ((name, tensor) for name, tensor in getattr(self._module, names)() if owns(name))
        return [(name, tensor) for name, tensor in own if not _lamina.is_odd(tensor)]
