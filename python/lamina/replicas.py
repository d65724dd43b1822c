# SPDX-License-Identifier: Apache-2.0
"""The copies of a model that read different data: their gradients are averaged, their buffers kept alike.

[Note: pass] A backward pass is one call of a step function in which a backward was called, or, outside step functions,
one outermost backward that reaches a parameter. The gradients are averaged after every `backward_passes_per_step`-th,
until then they accumulate on each replica. The counter goes on over the life of the model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from lamina import _lamina, nest
from lamina.errors import PeerError, UsageError
from lamina.groups import ProcessGroups


class Replicas:
    """This rank's part of the model, and the same part on the other replicas.

    Args:
        session, groups: of the job.
        module: the model.
        owns: whether this rank owns what has a name; asked once the model is partitioned.
        passes: backward passes per reduction, see [Note: pass].
        bucket_bytes: about how much of the gradients travels at a time.
        broadcast_buffers: whether buffers get the values of the first replica after each reduction.
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
        self._done = 0
        self._in_step = False
        self._passed = False  # there was a backward in this step, or gradients were accumulated in this backward
        self._awaiting = False  # the end of this backward will call us
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @contextmanager
    def step(self) -> Iterator[Callable[[], bool]]:
        """Around a step: what it yields tells whether a backward was called in it so far."""
        self._in_step, self._passed = True, False
        try:
            yield lambda: self._passed
        finally:
            self._in_step = False

    def note_backward(self) -> None:
        """A backward begins."""
        self._passed = self._passed or self._in_step

    def note_forward(self, output: Any) -> None:
        """The model has returned `output`. A backward through it is one, checkpoints in the model that run backwards of
        their own included: it reaches the output first."""
        if not self._in_step and torch._C._current_graph_task_id() < 0:
            self._passed = self._awaiting = False  # a backward that failed has left them
        if torch.is_grad_enabled():
            nest.map_tensors(self._notice_backward, output)

    def finish_pass(self) -> None:
        """Ends a backward pass, see [Note: pass]; collective over the replicas."""
        self._done += 1
        if self._done % self._passes:
            return
        group = self._groups.get("dp")
        try:
            _lamina.average_gradients(self._session, group, self._own("named_parameters"), self._bucket_bytes)
            if self._broadcast_buffers:
                _lamina.broadcast_buffers(self._session, group, self._own("named_buffers"))
        except (UsageError, PeerError):
            raise
        except BaseException:  # too late, or interrupted
            self._groups.stuck = True
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
            # The parameters that it goes on to may all be those of other partitions.
            self._passed = self._passed or self._partitions > 1
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
