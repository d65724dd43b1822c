# SPDX-License-Identifier: Apache-2.0
"""A model spread over the ranks of its pipeline."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lamina import _lamina
from lamina.data_parallel.comm_hooks import CommHook
from lamina.data_parallel.replicas import Averaging, Replicas
from lamina.deferred_init import delayed
from lamina.errors import UsageError, refusal, said
from lamina.exits.device_errors import explain, explained
from lamina.job import current, groups, parts
from lamina.libraries import keras
from lamina.model import precision
from lamina.optim.sliced import see_to_steps
from lamina.pipeline import conversions, replaced_model
from lamina.pipeline.batches import on_rank
from lamina.pipeline.compiled_parts import in_place, require_no_graphs
from lamina.pipeline.gradients import Gradients
from lamina.pipeline.life import Life
from lamina.pipeline.model_hooks import Hook, ModelHooks
from lamina.pipeline.outside_calls import OutsideCalls
from lamina.pipeline.routing import Routing
from lamina.pipeline.state_dicts import StateDicts
from lamina.pipeline.wrapped import Names, WrappedModule, as_in_wrapped, require_wrappable
from lamina.proof.parts import wholes
from lamina.proof.proofs import Proofs
from lamina.tensor_parallel import layers, slicing, unslicing
from lamina.tensor_parallel.calls import Calls
from lamina.torch_patches import clipping
from lamina.tracing.trace import options_of
from lamina.util.checks import require_booleans, require_count, require_positive

_EVALUATION = "; to evaluate, call it on all ranks of the pipeline under torch.no_grad(): docs/evaluation.md"


class DistributedModel(WrappedModule, parts.Model):
    """A model whose modules are spread over the ranks of its pipeline. There is one per job.

    With more than one partition the model is cut at the first call of a step function, and is called inside step
    functions only. With one it is ready at once and may be called anywhere. Names of parameters, buffers and modules
    are those of the module that is wrapped. With the configuration `fp16` or `bf16` its parameters and buffers of
    floating-point numbers become half, and so do such arguments of its calls.

    With several replicas and `ddp`, gradients are their mean over the replicas when a step function, or a backward
    outside of one, returns. Every replica runs as many backward passes; one that fails on a replica fails on all, and
    leaves gradients that are to be zeroed. A gradient that no replica has stays None; one
    that only some have counts as zero on the others; sparse gradients become dense.

    Args:
        module: the model. All ranks build the same; the values are those of world rank 0.
        average_grads_across_microbatches: whether losses are means over the samples of a microbatch, of which
            `backward` in a step makes gradients of the mean over all samples, those of other replicas included. Torch's
            `loss.backward()`, which works there too, adds them up.
        backward_passes_per_step: with `ddp`: after how many backward passes the gradients are averaged over the
            replicas. Until then they add up on each; they are not divided by this number. A pass is a call of a step
            function in which there was a backward or, outside step functions, a backward.
        bucket_cap_mb: with `ddp`: about how many MiB of gradients travel at a time.
        broadcast_buffers: with `ddp`: whether buffers get the values of the first replica whenever gradients have been
            averaged, so that running statistics are the same on all.
        trace_device: where the model runs when times or memory are measured: "gpu" is the rank's own device, "cpu" the
            host, which has room for models that no device has.
        trace_execution_times: whether the first call of the model is timed, on one rank alone, to cut it well; else its
            operations are counted.
        trace_memory_usage: whether the memory that modules keep is measured while the model runs on one rank alone;
            else it is found out without running it.
        overlapping_allreduce: with `ddp`: whether gradients are averaged while the backward still runs, in groups over
            shared memory. The results are the same; a communication hook or `deterministic_server` excludes it.
        gradient_as_bucket_view: with `ddp`: whether averaged gradients are views of the memory in which they travelled,
            to spare a copy. None stays None.
        find_unused_parameters: accepted; parameters without a gradient are always allowed.

    Errors:
        UsageError: no `init`, a second model, or a model inside or around one of torch's own data-parallel wrappers.
            Also for times of a host that has another device to run the model, and an argument that is not of its type.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ):
        job = current.outside_step("DistributedModel()")
        module = in_place(require_wrappable(module))
        if job.has_model:
            raise refusal("model-twice")
        if job.pipelined:
            require_no_graphs(module)
        require_booleans(
            trace_execution_times=trace_execution_times,
            overlapping_allreduce=overlapping_allreduce,
            average_grads_across_microbatches=average_grads_across_microbatches,
            trace_memory_usage=trace_memory_usage,
            broadcast_buffers=broadcast_buffers,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
        )
        trace_options = options_of(trace_device, trace_execution_times, trace_memory_usage)
        require_count(backward_passes_per_step=backward_passes_per_step)
        require_positive(bucket_cap_mb=bucket_cap_mb)
        averaging = Averaging(
            backward_passes_per_step,
            overlapping_allreduce,
            average_grads_across_microbatches,
            float(bucket_cap_mb),
            broadcast_buffers,
            gradient_as_bucket_view,
        )
        keras.register_own_parameters(module)
        # Set before the module is there: of a name that this has, too, it would be set in the module.
        module = self._prepare(module, job)
        self._steps = 0  # that have ended well
        self._when_partitioned, self._after_step = ModelHooks(), ModelHooks()
        self._outside_calls = OutsideCalls()
        self._trace_options, self._averaging = trace_options, averaging
        self._has_comm_hook = False
        self._begin(job)
        super().__init__(module)
        self._join(job)
        if not job.pipelined:
            self._life.make()

    def _begin(self, job: current.Job) -> None:
        """Makes its parts in a job, which has another layout than one before."""
        self._routing, self._gradients = Routing(self.get_module), Gradients()
        self._life = Life(self.get_module, self._trace_options, vars(self._averaging), self._routing, self._gradients)
        self._life.when_routed = self._tell_partitioned
        self._states = StateDicts(self.get_module, self._life, self._gradients)
        self._backwards = _lamina.Backwards(job.session, self._averaging.average_grads_across_microbatches)
        self._backwards.scale_by(job.loss_scale)
        self._replicas: Replicas | None = None  # also of one copy, which a communication hook may have

    def _join(self, job: current.Job) -> None:
        """Is the job's model from now on."""
        job.model, job.life, job.routing, job.gradients = self, self._life, self._routing, self._gradients
        self._average(job, self._averaging)

    def go_on_in(self, job: current.Job) -> None:
        """Is the model of a job of the same ranks in another layout; whole, and not cut yet."""
        before = self._life
        unslicing.forget(self.module)
        self._slice(self.module, job)
        self._begin(job)
        self._life.go_on_from(before)
        self._join(job)

    def tell(self, job: _lamina.ChangingJob) -> None:
        """Tells what of it does not allow another layout."""
        job.has_model, job.is_cut, job.has_hook = True, self.partitioned, self._has_comm_hook
        job.joins = self._replicas is not None and self._replicas.are_joining
        job.odd_buffers = [name for name, buffer in self.named_buffers() if _lamina.is_odd(buffer)]

    def relies(self) -> list[str]:
        """Clauses that say what of it relies on the layout that there is."""
        clauses = [f"{name} has got another class since it was sliced" for name in unslicing.changed_since(self.module)]
        if self._has_replaced:
            clauses.append("the job translates names of modules that have become others")
        return clauses

    def _prepare(self, module: nn.Module, job: current.Job) -> nn.Module:
        """The model as it is wrapped: with others for marked modules, in the dtype of the job, with sliced layers."""
        replaced = replaced_model.make(module, job)
        module = replaced.root
        precision.convert_model(module, job.session.config)
        self._dtype = precision.half_of(job.session.config)
        self._has_replaced = bool(replaced.modules)
        self._slice(module, job)
        if replaced.rows and not self._is_sliced:
            see_to_steps(job)
        return module

    def _slice(self, module: nn.Module, job: current.Job) -> None:
        """Leaves this rank its slices of layers, in a job where several have those of a model."""
        self._is_sliced = job.sliced
        self._proofs = _sliced(module, job) if self._is_sliced else None
        one_batch = self._is_sliced and job.session.config.prescaled_batch
        self._calls = Calls(module, job.session) if one_batch else None
        if self._is_sliced:
            see_to_steps(job)

    def _average(self, job: current.Job, averaging: Averaging) -> None:
        """Has the gradients averaged over the copies of the model, with `ddp`."""
        copies = job.session.group_size("replicas")
        if not job.session.config.ddp:
            if copies > 1 and job.session.rank == 0:
                warnings.warn(said("copies-apart", copies), stacklevel=3)
            return
        self._replicas = Replicas(job, self.module, lambda: self._life.model, averaging)
        if copies > 1:
            job.replicas = self._replicas
            self._gradients.see_to_updates()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a DistributedModel is neither copied nor pickled, for a job has one: copy the module before it is wrapped "
            "(AveragedModel(model.module) and copy.deepcopy(model.module) where it is whole), save model.state_dict()",
            code="model-copied",
        )

    @as_in_wrapped
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model. With more than one partition inside step functions; outside of them without gradients, and
        on all ranks of the pipeline alike. Else UsageError. Outside of them tensors of the host go to the rank's
        device."""
        in_step = _lamina.in_step()
        if self._life.pipelined and not torch.is_grad_enabled() and not in_step:
            self._life.require_job("a call")
            return self._outside_calls.call(args, kwargs)
        job = self._life.job_if_any()
        if job is None or not in_step:
            self._check_called("the model was called", "a call", _EVALUATION)
        replicas = parts.Replicas() if job is None else job.replicas
        if not in_step:
            if job is not None:
                self._life.share_written()
                job.before_step()
            replicas.see_batch((args, kwargs))
            args, kwargs = on_rank((args, kwargs))
        if torch.is_grad_enabled() and not self._life.pipelined:
            self._life.slice_again()
            if job is not None:
                self._gradients.watch()
        call = replicas.note_call()
        if self._dtype is not None:
            args, kwargs = precision.convert_inputs((args, kwargs), self._dtype)
        if self._calls is not None and job is not None:
            self._calls.note(args, kwargs)
        try:
            if self._proofs is None:
                output = self.module(*args, **kwargs)
            else:
                with self._proofs.watching(self.module):
                    output = wholes(self.module(*args, **kwargs))
        except BaseException as error:
            explain(error)
            if self._is_sliced and job is not None and not in_step:
                job.session.give_up_step(error)  # the others wait for what this call was to give them
            raise
        replicas.note_forward(call, output)
        return output

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """The backward pass of `tensors` over all ranks, as torch.autograd.backward does it on one.

        In a step the gradients of a microbatch count as much as its part of all samples, unless the model was made with
        average_grads_across_microbatches=False: see [Note: uneven batches] in lamina/pipeline/pieces.h. They are
        multiplied by the loss scale that a DistributedOptimizer has, whose step divides them by it.

        Args:
            tensors: outputs, or what was computed from them; scalars unless their gradient is given.
            grad_tensors: a gradient, or None, for each.

        Errors:
            UsageError: outside a step function, with more than one partition; not one gradient for each tensor; no
                tensor at all.
        """
        self._life.require_job("backward")
        self._check_called("model.backward was called", "backward")
        outputs = _listed(tensors)
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                kind = type(output).__name__
                raise UsageError(f"model.backward() takes the loss as a tensor, as the model computed it, not {kind}")
        gradients = [None] * len(outputs) if grad_tensors is None else _listed(grad_tensors)
        if len(gradients) != len(outputs):
            raise refusal("gradients-for-tensors", len(outputs), len(gradients))
        job = current.job()
        job.step_check.see_backward(outputs)
        with explained():
            self._backwards.run(outputs, gradients, job.replicas.reducer)

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
        self._life.job("grad_norm()")
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
        self._life.job("clip_grad_norm_()")
        self._gradients.complete("clip_grad_norm_()")
        return nn.utils.clip_grad_norm_(list(self.parameters()), max_norm, norm_type, error_if_nonfinite, foreach)

    def register_comm_hook(self, state: Any, callable: CommHook) -> None:
        """Has `callable(state, bucket)` make the gradients what they become at the end of a backward pass, in the place
        of averaging them over the replicas. It is called on every replica for each bucket, in the same order, and
        returns a torch.futures.Future of the bucket's new buffer. Hooks of ddp_comm_hooks, torch's own, work.

        The hook does all of the averaging: `backward` then divides by no number of microbatches either.

        Args:
            state: for the hook, which torch's take for a process group: `get_dp_process_group()`.
            callable: the hook; its bucket has the methods of torch.distributed.GradBucket.

        Errors:
            UsageError: without `ddp`, with overlapping_allreduce=False, or a second time.
        """
        job = self._life.job("DistributedModel.register_comm_hook()")
        if self._replicas is None:
            raise refusal("needs-ddp", "register_comm_hook()")
        if not self._averaging.overlapping_allreduce:
            raise UsageError("register_comm_hook() needs overlapping_allreduce=True")
        if not hasattr(callable, "__call__"):  # noqa: B004 -- the argument's name is the original's
            raise refusal("not-a-function", "register_comm_hook()", type(callable).__name__)
        self._replicas.set_hook(state, callable)
        self._has_comm_hook = True
        self._backwards.add_up()  # the hook does all of the averaging
        job.replicas = self._replicas
        self._gradients.watch()

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """A context for a training loop in which replicas may have different numbers of batches.

        A replica that leaves it takes part in the reductions of the others, with zero gradients, until all have left.
        At the end all have the parameters and buffers of the one that trained longest; the states of optimizers stay as
        they are. Every replica makes at least one step.

        Args:
            divide_by_initial_world_size: whether gradients are divided by the number of all replicas, as before, or by
                that of the replicas that still train.
            enable: with False nothing is joined, for data that is known to be even.
            throw_on_early_termination: has all replicas raise UsageError when the first has left.

        Errors:
            UsageError: without `ddp`, inside a step function, or on leaving without a step.
        """
        require_booleans(
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )
        job = self._life.job("DistributedModel.join()")
        if self._replicas is None:
            raise refusal("needs-ddp", "join()")
        if not enable or job.replicas is not self._replicas:
            yield
            return
        with self._replicas.join(divide_by_initial_world_size, throw_on_early_termination):
            yield
            if not self.partitioned:
                raise refusal("no-step-in-join")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients stay with this copy of the model, and add up: torch's
        `DistributedDataParallel.no_sync()`. The next backward after it averages them all; so does an optimizer's step
        that comes first. Forwards belong inside, as with torch. Nobody waits for other copies in it, so that these may
        have different numbers of backwards there. Without `ddp`, or with one copy, it does nothing."""
        replicas = self._life.job("DistributedModel.no_sync()").replicas
        if replicas.averages and not replicas.accumulates:
            replicas.accumulates = True
            self._gradients.see_to_norms()
        with replicas.no_sync():
            yield

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Has `hook(model, optimizer)` called once, in the first call of a step function: when the model is partitioned
        and before its first forward. After that step it is called at once.

        Args:
            hook: called on every rank. `optimizer` is the DistributedOptimizer, the latest of several, None if none.

        Returns:
            A handle; its `remove()` takes the hook back.
        """
        return self._when_partitioned.add(self, hook, at_once=self._routing.is_on)

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Has `hook(model, optimizer)` called once, at the end of the next call of a step function, on every rank: when
        the model is partitioned, and before the optimizer's step.

        Args:
            hook: see `register_post_partition_hook`.

        Returns:
            A handle; its `remove()` takes the hook back.
        """
        return self._after_step.add(self, hook)

    @property
    def backwards(self) -> _lamina.Backwards:
        """Its own backwards, which multiply by the loss scale."""
        return self._backwards

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; UsageError inside the step function of a pipeline."""
        current.everywhere("zero_grad()")
        super().zero_grad(set_to_none)
        self._backwards.forget_plain()

    @property
    def steps(self) -> int:
        """Its steps that have ended on this rank."""
        return self._steps

    def in_step(self) -> dict[str, Any]:
        """Returns what the engine is told of the model in a step; see `Session.run_step`."""
        self._gradients.watch()
        return {
            "backwards": self._backwards,
            "parameters": lambda: list(self.module.parameters()),
            "reducer": current.job().replicas.reducer,
            "training": self.module.training,
        }

    def end_step(self) -> None:
        """A step has ended well."""
        self._steps += 1
        self._after_step.run(self)

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

    def state_dict(
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        gather_to_rank0: bool = False,
    ) -> dict[str, Any]:
        """The whole model's state, which the wrapped module's class loads as it is.

        Once the model is partitioned, collective over the ranks of the pipeline: all of them call it, and all get it.

        Args:
            destination: what the state is put into, and is returned; None for a new dictionary.
            prefix: put before every name.
            keep_vars: only before partition, or with one partition: as torch's.
            gather_to_rank0: only mp_rank 0 gets it; the others get {}.

        Errors:
            UsageError: inside a step function.
        """
        return self._states.save(destination, prefix, keep_vars, gather_to_rank0)

    def local_state_dict(self) -> dict[str, Any]:
        """The state of what this rank owns, and of what is sliced its slices: a partial dictionary, marked by the key
        `_smp_is_partial`.

        Errors:
            UsageError: before the model is partitioned, or inside a step function.
        """
        self._life.job("local_state_dict()")
        self._require_partitioned()
        return self._life.state().local()

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        *,
        same_partition_load: bool = False,
    ) -> Any:
        """Loads a state, full or partial: every rank keeps what it owns. Collective over the ranks of the pipeline;
        nothing is written on any of them unless it fits on all.

        Args:
            state_dict: as from `state_dict()`, or from the wrapped module's class, or from `local_state_dict()`. A
                partial one that comes before the model is partitioned is loaded when it is. Names of modules that have
                become others are translated, unless it says by `_smp_is_partial: False` that they are the model's own.
            strict: whether names have to be the same.
            assign: only before partition, or with one partition: as torch's.
            same_partition_load: partial ones are of this very partition: each rank loads its own, without a look at
                the others'. Else the ranks put theirs together when they do not fit.

        Returns:
            torch's NamedTuple of missing_keys and unexpected_keys; both empty for what is loaded later.

        Errors:
            UsageError, which is a RuntimeError: names, shapes or the partition do not fit. Whole models are torch's
            business: RuntimeError.
        """
        return self._states.load(state_dict, strict, assign, same_partition_load)

    def to(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As torch's, on every rank. With more than one partition, a device is ignored until the model is partitioned:
        it may have no room for the whole model.

        Errors:
            UsageError: an accelerator that the rank does not compute on.
        """
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        conversions.require_own(device)
        if not self._life.pipelined or self.partitioned:
            return super().to(*args, **kwargs)
        given = {"dtype": dtype, "memory_format": memory_format}
        given = {name: value for name, value in given.items() if value is not None}
        return super().to(non_blocking=non_blocking, **given) if given else self

    def cuda(self, device: int | torch.device | None = None) -> nn.Module:
        """As `to`."""
        return self.to("cuda" if device is None else torch.device("cuda", device) if type(device) is int else device)

    def cpu(self) -> nn.Module:
        """Moves the model to the CPU, and with more than one partition, or slices, brings it together. On every rank it
        is whole until the next step, or the next call with gradients, and may be called like the plain one. Collective
        over the ranks that have one copy of it.

        Errors:
            UsageError: inside a step function.
        """
        if not self._life.whole_everywhere:
            self._life.job("cpu()")
            self._life.take_back()
        return super().cpu()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Does what `to`, `half`, `double`, ... do."""
        apply = functools.partial(super()._apply, fn, recurse)
        conversions.convert(self._life, self._gradients, fn, apply)
        return self

    def _fqn_modifiers(self) -> dict[str, str]:
        """Names that torch's helpers of state dicts leave out; the word is theirs."""
        return self._states.names_of_wrapped()

    def _tell_partitioned(self) -> None:
        self._when_partitioned.run(self)

    def _check_called(self, what: str, name: str, otherwise: str = "") -> None:
        if not self._life.pipelined:
            return
        self._life.require_job(name)
        if not current.in_step():
            raise refusal("outside-step", what, "decorated with @lamina.step" + otherwise)

    def _local(self, named: Names) -> Names:
        self._require_partitioned()
        return ((name, value) for name, value in named if self._life.model.owns(name))

    def _require_partitioned(self, otherwise: str = "nothing is local") -> None:
        if not self.partitioned:
            raise refusal("not-cut", otherwise)


def _sliced(module: nn.Module, job: current.Job) -> Proofs | None:
    """Cuts the layers of a model. Returns the proofs of its calls, where they are wanted."""
    groups.of_job()
    slicing.slice_model(module, job.session, delayed.initialise)
    proofs = Proofs(module, job.session) if job.session.config.prove_slices else None
    slicing.let_batches_take_turns(module, job.session)
    return proofs


def _listed(tensors: torch.Tensor | Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    is_one = isinstance(tensors, (torch.Tensor, str, Mapping)) or not isinstance(tensors, Iterable)
    return [tensors] if is_one else list(tensors)


def distribute(module: nn.Module, **options: Any) -> DistributedModel:
    """`DistributedModel(module, **options)`."""
    return DistributedModel(module, **options)
