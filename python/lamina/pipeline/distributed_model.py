# SPDX-License-Identifier: Apache-2.0
"""A model spread over the ranks of its pipeline."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lamina import _lamina
from lamina.data_parallel.comm_hooks import CommHook
from lamina.data_parallel.replicas import Replicas
from lamina.deferred_init import delayed
from lamina.errors import UsageError, refusal, said
from lamina.job import current, groups, parts
from lamina.model import precision
from lamina.optim.sliced import see_to_steps
from lamina.pipeline import replaced_model
from lamina.pipeline.compiled_parts import in_place
from lamina.pipeline.model_hooks import Hook, ModelHooks
from lamina.pipeline.outside_calls import OutsideCalls
from lamina.pipeline.saved_model import SavedModel
from lamina.pipeline.wrapped import as_in_wrapped, require_wrappable
from lamina.proof.parts import wholes
from lamina.proof.proofs import Proofs
from lamina.tensor_parallel import slicing
from lamina.tensor_parallel.calls import Calls
from lamina.tracing.trace import options_of
from lamina.util.checks import require_booleans, require_count, require_positive

_EVALUATION = "; to evaluate, call it on all ranks of the pipeline under torch.no_grad(): docs/evaluation.md"


class DistributedModel(SavedModel):
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
        if job.model is not None:
            raise refusal("model-twice")
        require_booleans(
            trace_execution_times=trace_execution_times,
            overlapping_allreduce=overlapping_allreduce,
            average_grads_across_microbatches=average_grads_across_microbatches,
            trace_memory_usage=trace_memory_usage,
            broadcast_buffers=broadcast_buffers,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
        )
        trace_options = options_of(trace_device, trace_execution_times, trace_memory_usage, job.session.local_rank)
        require_count(backward_passes_per_step=backward_passes_per_step)
        require_positive(bucket_cap_mb=bucket_cap_mb)
        replaced = replaced_model.make(module, job)
        module = replaced.root
        precision.convert_model(module, job.session.config)
        self._dtype = precision.half_of(job.session.config)
        self._is_sliced = job.sliced
        self._proofs = _sliced(module, job) if self._is_sliced else None
        one_batch = self._is_sliced and job.session.config.prescaled_batch
        self._calls = Calls(module, job.session) if one_batch else None
        if self._is_sliced or replaced.rows:
            see_to_steps(job)
        super().__init__(module, trace_options, lambda: self._when_partitioned.run(self))
        self._life.arguments = {
            "backward_passes_per_step": backward_passes_per_step,
            "overlapping_allreduce": overlapping_allreduce,
            "average_grads_across_microbatches": average_grads_across_microbatches,
            "bucket_cap_mb": float(bucket_cap_mb),
            "broadcast_buffers": broadcast_buffers,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._when_partitioned, self._after_step = ModelHooks(), ModelHooks()
        self._outside_calls = OutsideCalls()
        self._steps = 0  # that have ended well
        self._backwards = _lamina.Backwards(job.session, average_grads_across_microbatches)
        if job.loss_scale is not None:
            self._backwards.scale_by(job.loss_scale)
        self._overlapping = overlapping_allreduce
        self._replicas = self._average(job, **self._life.arguments)
        if not job.pipelined:
            self._life.make()

    def _average(
        self,
        job: current.Job,
        backward_passes_per_step: int,
        overlapping_allreduce: bool,
        bucket_cap_mb: float,
        broadcast_buffers: bool,
        gradient_as_bucket_view: bool,
        **_: bool,
    ) -> Replicas | None:
        """Has the gradients averaged over the copies of the model, with `ddp`; else None."""
        if not job.session.config.ddp:
            if (replicas := job.session.group_size("replicas")) > 1 and job.session.rank == 0:
                warnings.warn(said("copies-apart", replicas), stacklevel=3)
            return None
        process_groups = groups.of_job()
        job.session.order_turns(list(self.module.parameters()))
        overlap = overlapping_allreduce and not job.session.config.deterministic_server
        bucket_bytes = int(bucket_cap_mb * 2**20)
        reduction = (backward_passes_per_step, bucket_bytes, broadcast_buffers, overlap, gradient_as_bucket_view)
        owns = lambda name: self._life.model.owns(name)  # noqa: E731
        table = lambda: self._life.model.table  # noqa: E731
        replicas = Replicas(job.session, process_groups, self.module, owns, table, *reduction)
        if job.session.group_size("replicas") > 1:
            job.replicas = replicas
            self._gradients.see_to_updates()
        job.on_end.callback(replicas.unwatch)
        return replicas

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a DistributedModel is neither copied nor pickled, for a job has one: copy the module before it is wrapped "
            "(AveragedModel(model.module) and copy.deepcopy(model.module) where it is whole), save model.state_dict()",
            code="model-copied",
        )

    @as_in_wrapped
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model. With more than one partition inside step functions; outside of them without gradients, and
        on all ranks of the pipeline alike. Else UsageError."""
        if self._life.pipelined and not torch.is_grad_enabled() and not current.in_step():
            self._require_job("a call")
            return self._outside_calls.call(args, kwargs)
        self._check_called("the model was called", "a call", _EVALUATION)
        job = self._job_if_any()
        replicas = parts.Replicas() if job is None else job.replicas
        if not current.in_step():
            if job is not None:
                self._life.share_written()
            replicas.see_batch((args, kwargs))
        if torch.is_grad_enabled() and not self._life.pipelined:
            self._life.slice_again()
            self._watch()
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
            if self._is_sliced and job is not None and not current.in_step():
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
        self._require_job("backward")
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
        self._backwards.run(outputs, gradients, job.replicas.reducer)

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
        job = self._own_job("DistributedModel.register_comm_hook()")
        if self._replicas is None:
            raise refusal("needs-ddp", "register_comm_hook()")
        if not self._overlapping:
            raise UsageError("register_comm_hook() needs overlapping_allreduce=True")
        if not hasattr(callable, "__call__"):  # noqa: B004 -- the argument's name is the original's
            raise refusal("not-a-function", "register_comm_hook()", type(callable).__name__)
        self._replicas.set_hook(state, callable)
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
        job = self._own_job("DistributedModel.join()")
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
        replicas = self._own_job("DistributedModel.no_sync()").replicas
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

    def _require_job(self, what: str) -> None:
        job = current.job_if_any()
        if job is None or job.model is not self:
            raise refusal("job-ended", what, "DistributedModel")

    def _check_called(self, what: str, name: str, otherwise: str = "") -> None:
        if not self._life.pipelined:
            return
        self._require_job(name)
        if not current.in_step():
            raise refusal("outside-step", what, "decorated with @lamina.step" + otherwise)


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
