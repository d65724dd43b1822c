# SPDX-License-Identifier: Apache-2.0
"""A module that is cut over the ranks of a pipeline: which parts of it are here, and what is done to all of them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lamina.errors import UsageError, refusal
from lamina.job import current
from lamina.model import shards
from lamina.model.places import only_own, without
from lamina.pipeline.gradients import Gradients
from lamina.pipeline.life import Life
from lamina.pipeline.routing import Routing
from lamina.pipeline.wrapped import Names, WrappedModule
from lamina.tensor_parallel import layers
from lamina.torch_patches import clipping, state_helpers
from lamina.tracing.trace import TraceOptions
from lamina.util.told import tell


class CutModel(WrappedModule):
    """The wrapper of a job's model, which is whole at first; then ranks own parts of it.

    Args:
        module: the one that is wrapped.
        trace_options: how it is traced.
        when_routed: called once, when its calls go to the owners.
    """

    def __init__(self, module: nn.Module, trace_options: TraceOptions, when_routed: Callable[[], None]):
        super().__init__(module)
        job = current.job()
        self._routing, self._gradients = Routing(self.get_module), Gradients()
        self._life = Life(self.get_module, trace_options, when_routed, self._routing, self._gradients)
        job.model, job.life, job.routing, job.gradients = self, self._life, self._routing, self._gradients
        self._helpers_know = False  # torch's helpers of state dicts
        self._told_unmoved = False  # that a device had no effect

    @property
    def partitioned(self) -> bool:
        """True where it is known who owns what: from the first step on, with one partition from the start."""
        return self._life.model is not None

    def partition_report(self) -> dict[str, Any]:
        """How the model was cut, on every rank. "partition" has the partition of each module, by name, and "stages" a
        dictionary for each partition, with "time_us", "parameter_bytes", "memory_bytes" and "out_bytes". There are
        "predicted_step_us", "bubble" and "warning". The trace adds "reads_data" and "draws", names of modules that let
        data decide and that draw random numbers; "ties", the modules that share each attribute; and "notes", on what
        could not be found out. "slices" are names of layers that are cut over a TP_GROUP; "exchange_us" has the part of
        a module's time that their exchanges take. Before partition: UsageError."""
        self._require_partitioned("there is no report")
        return self._life.model.report

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of what this rank owns. Before partition: UsageError."""
        return self._local(self.named_parameters())

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this rank owns. Before partition: UsageError."""
        return (parameter for _, parameter in self.local_named_parameters())

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of those here whose gradients are reduced over DP_GROUP. Before partition: UsageError."""
        return self._reduced_over("dp")

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of those here whose gradients are reduced over RDP_GROUP, because the ranks of a TP_GROUP
        have different parts of them. Before partition: UsageError."""
        return self._reduced_over("rdp")

    def distributed_modules(self) -> Iterator[nn.Module]:
        """The layers of which the ranks of a TP_GROUP compute parts."""
        return filter(layers.is_sliced, self.modules())

    def is_distributed_parameter(self, parameter: torch.Tensor) -> bool:
        """True for a parameter of which this rank has a slice."""
        return id(parameter) in layers.slicings(self)

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """True for a buffer of which this rank has a slice: there are none."""
        return False

    def is_scaled_batch_parameter(self, parameter: torch.Tensor) -> bool:
        """True for a parameter whose gradient is reduced over RDP_GROUP; see
        `scaled_batch_reducer_named_parameters`."""
        return self.is_distributed_parameter(parameter)

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """True for a buffer of a layer that has a slice of it: there are none."""
        return False

    def _reduced_over(self, group: str) -> Iterator[tuple[str, nn.Parameter]]:
        return (
            (name, parameter)
            for name, parameter in self.local_named_parameters()
            if self._life.model.table.reduced_over(parameter) == group
        )

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, buffer) of what this rank owns. Before partition: UsageError."""
        return self._local(self.named_buffers())

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """The buffers that this rank owns. Before partition: UsageError."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of what this rank owns. Before partition: UsageError."""
        return self._local(self.named_modules())

    def local_modules(self) -> Iterator[nn.Module]:
        """The modules that this rank owns. Before partition: UsageError."""
        return (module for _, module in self.local_named_modules())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; UsageError inside the step function of a pipeline."""
        current.everywhere("zero_grad()")
        super().zero_grad(set_to_none)

    def grad_norm(
        self, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """The norm of the gradients over the whole model, all partitions, each parameter counted once.

        What `torch.nn.utils.get_total_norm` of them is, too. Called on every rank of the pipeline, after the step.

        Args:
            norm_type, error_if_nonfinite, foreach: as torch's.

        Returns:
            The norm, the same on every rank: what the plain model's would be.

        Errors:
            UsageError: inside a step function. RuntimeError: as torch's, on every rank.
        """
        self._own_job("grad_norm()")
        self._gradients.complete("grad_norm()")
        return clipping.grad_norm(list(self.parameters()), norm_type, error_if_nonfinite, foreach)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Scales the gradients so that their norm over the whole model, all partitions, is at most `max_norm`.

        What `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)` does, too. Called on every rank of the pipeline,
        after the step.

        Args:
            max_norm, norm_type, error_if_nonfinite, foreach: as torch's.

        Returns:
            The norm before, the same on every rank: what the plain model's would be.

        Errors:
            UsageError: inside a step function. RuntimeError: as torch's, on every rank.
        """
        self._own_job("clip_grad_norm_()")
        self._gradients.complete("clip_grad_norm_()")
        return nn.utils.clip_grad_norm_(list(self.parameters()), max_norm, norm_type, error_if_nonfinite, foreach)

    def to(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As torch's, on every rank. With more than one partition, a device is ignored until the model is partitioned:
        it may have no room for the whole model."""
        if not self._life.pipelined or self.partitioned:
            return super().to(*args, **kwargs)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        self._tell_unmoved(device)
        given = {"dtype": dtype, "memory_format": memory_format}
        given = {name: value for name, value in given.items() if value is not None}
        return super().to(non_blocking=non_blocking, **given) if given else self

    def _tell_unmoved(self, device: torch.device | None) -> None:
        """Says once that the model did not move, and what happens."""
        here = {parameter.device.type for parameter in self.parameters()}
        if device is None or device.type in here or device.type == "meta" or self._told_unmoved:
            return
        self._told_unmoved = True
        if device.type == "cuda" and not torch.cuda.is_available():
            then = "there is no CUDA device here, and it is trained on the CPU"
        else:
            then = "call it once more after the first step, which partitions the model"
        if current.session().rank == 0:
            tell(f'model.to("{device}") had no effect, as no rank is to hold all of the model there: {then}')

    def cpu(self) -> nn.Module:
        """Moves the model to the CPU, and with more than one partition, or slices, brings it together. On every rank it
        is whole until the next step, or the next call with gradients, and may be called like the plain one. Collective
        over the ranks that have one copy of it.

        Errors:
            UsageError: inside a step function.
        """
        if not self._life.whole_everywhere:
            self._own_job("cpu()")
            self._life.take_back()
        return super().cpu()

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch's helpers of state dicts (`torch.distributed.checkpoint.state_dict`), whose word this is, that
        names are those of the wrapped module. They call it before anything else."""
        if (job := current.job_if_any()) is not None and not self._helpers_know:
            self._helpers_know = state_helpers.install(_require_whole, job.on_end)
        module = self.module
        return dict.fromkeys((*module._modules, *module._parameters, *module._buffers), "module")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Does what `to`, `half`, `double`, ... do: of what other ranks own there is only the metadata to change."""
        life = self._life
        if life.whole:
            life.model.conversions += 1
        if life.whole_everywhere or life.whole:
            self._let_go()
            super()._apply(fn, recurse)
            self._watch()
            return self
        sharded = shards.require_unchanged(fn)
        with only_own(life.model) as foreign, without(life.model.tree.root, sharded):
            super()._apply(fn, recurse)
        for name, tensor, owner in foreign:
            like = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (like.dtype, like.device) != (tensor.dtype, tensor.device):
                whole = torch.empty(tensor.shape, dtype=like.dtype, device=like.device)
                current.session().release(tensor, name, owner, whole)
        life.model.conversions += 1
        self._watch()
        return self

    def _let_go(self) -> None:
        """Where conversions swap parameters with others, nobody else may hold them: torch counts."""
        if torch.__future__.get_swap_module_params_on_conversion() and self._job_if_any() is not None:
            self._gradients.let_go()

    def _watch(self) -> None:
        """Its parameters may be others now."""
        if self._job_if_any() is not None:
            self._gradients.watch()

    def _job_if_any(self) -> current.Job | None:
        """Its job; None when that has ended."""
        job = current.job_if_any()
        return job if job is not None and job.model is self else None

    def _own_job(self, what: str) -> current.Job:
        """The job, outside of steps, for what it is to do with this model."""
        job = current.outside_step(what)
        if job.model is not self:
            raise refusal("job-ended", what, "DistributedModel")
        self._life.share_written()
        return job

    def _local(self, named: Names) -> Names:
        self._require_partitioned()
        return ((name, value) for name, value in named if self._life.model.owns(name))

    def _require_partitioned(self, otherwise: str = "nothing is local") -> None:
        if not self.partitioned:
            raise refusal("not-cut", otherwise)


def _require_whole(optimizer: torch.optim.Optimizer) -> None:
    """Refuses in torch's helpers an optimizer that has something else in the places of the model's parameters."""
    job = current.job_if_any()
    own = next((each for each in job.optimizers if each.optimizer is optimizer), None) if job is not None else None
    if own is not None and not (own.is_whole() and job.life.whole_everywhere):
        raise UsageError(
            "torch's helpers of state dicts take an optimizer that has the model's own parameters, all of them; this "
            "one has parts of them, or masters: take optimizer.state_dict() and load_state_dict(), or "
            "lamina.save_checkpoint() and resume_from_checkpoint()",
            code="state-helpers",
        )
