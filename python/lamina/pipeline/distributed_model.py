# SPDX-License-Identifier: Apache-2.0
"""A model spread over the ranks of its pipeline."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lamina import _lamina
from lamina.data_parallel.comm_hooks import CommHook
from lamina.data_parallel.replicas import Replicas
from lamina.deferred_init.delayed import is_delayed
from lamina.errors import UsageError
from lamina.job import current, groups, seeds
from lamina.model.partitioned import only_own
from lamina.pipeline.cut import Cut
from lamina.saved_state.state_dicts import is_partial, saved_elsewhere, without_mark
from lamina.torch_patches import clipping
from lamina.tracing.trace import options_of
from lamina.util.checks import require_booleans, require_count, require_positive

_NOT_YET = {
    "distributed_modules",
    "is_distributed_parameter",
    "is_distributed_buffer",
    "is_scaled_batch_parameter",
    "is_scaled_batch_buffer",
    "default_reducer_named_parameters",
    "scaled_batch_reducer_named_parameters",
}

Names = Iterator[tuple[str, Any]]
Hook = Callable[["DistributedModel", torch.optim.Optimizer | None], Any]


class DistributedModel(nn.Module):
    """A model whose modules are spread over the ranks of its pipeline. There is one per job.

    With more than one partition the model is cut at the first call of a step function, and is called inside step
    functions only; with one it is ready at once and may be called anywhere. Names of parameters, buffers and modules
    are those of the module that is wrapped.

    With several replicas and `ddp`, gradients are their mean over the replicas when a step function, or a backward
    outside of one, returns. Every replica runs as many backward passes; one that fails on a replica fails on all, and
    leaves gradients that are to be zeroed. A gradient that no replica has stays None; one
    that only some have counts as zero on the others; sparse gradients become dense.

    Args:
        module: the model. All ranks build the same; the values are those of world rank 0.
        average_grads_across_microbatches: whether `backward` in a step divides gradients by the number of microbatches
            (torch's `loss.backward()`, which works there too, never does).
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
        overlapping_allreduce, gradient_as_bucket_view, find_unused_parameters: accepted; there is nothing yet that they
            could change. Parameters without a gradient are always allowed.

    Errors:
        UsageError: no `init`, a second model, a model inside or around one of torch's own data-parallel wrappers, times
            of a host that has another device to run the model, an argument that is not of its type.
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
        super().__init__()
        job = current.outside_step("DistributedModel()")
        _check_module(module)
        if job.model is not None:
            raise UsageError("there is a DistributedModel already: a job has one; call shutdown() to begin another job")
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
        self.module = module
        self._average = average_grads_across_microbatches
        self._overlapping = overlapping_allreduce
        self._replicas: Replicas | None = None  # with `ddp`
        self._post_partition_hooks: dict[int, Hook] = OrderedDict()
        self._post_step_hooks: dict[int, Hook] = OrderedDict()
        averaged = average_grads_across_microbatches
        self._backward_watch = _lamina.BackwardWatch(job.microbatches if averaged else 1)
        self._cut = Cut(self.get_module, job.pipelined, trace_options, self._run_post_partition_hooks)
        job.model, job.cut = self, self._cut
        if job.session.config.ddp:
            groups.of_job()
            reduction = (backward_passes_per_step, int(bucket_cap_mb * 2**20), broadcast_buffers)
            owns = lambda name: self._cut.model.owns(name)  # noqa: E731
            self._replicas = Replicas(job.session, job.groups, module, owns, *reduction)
            if job.session.group_size("dp") > 1:
                job.replicas = self._replicas
            job.on_end.callback(self._replicas.unwatch)
        if not job.pipelined:
            self._cut.make()

    # Calls.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model. With more than one partition inside step functions only, else UsageError."""
        self._check_called("the model was called")
        job = current.job_if_any()
        replicas = job.replicas if job is not None else None
        if replicas is not None:
            replicas.note_call()
        output = self.module(*args, **kwargs)
        if replicas is not None:
            replicas.note_forward(output)
        return output

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """The backward pass of `tensors` over all ranks, as torch.autograd.backward does it on one.

        In a step the gradients are divided by the number of microbatches, unless the model was made with
        average_grads_across_microbatches=False.

        Args:
            tensors: outputs, or what was computed from them; scalars unless their gradient is given.
            grad_tensors: a gradient, or None, for each.

        Errors:
            UsageError: outside a step function, with more than one partition; not one gradient for each tensor.
        """
        self._check_called("model.backward was called")
        outputs = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if grad_tensors is None:
            gradients = [None] * len(outputs)
        else:
            gradients = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
        if len(gradients) != len(outputs):
            raise UsageError(f"backward: {len(outputs)} tensors, but {len(gradients)} gradients")
        job = current.job()
        self._backward_watch.announce()
        if job.uneven is not None and current.in_step():
            raise UsageError(str(job.uneven))
        averaged = self._average and current.in_step() and not (job.replicas is not None and job.replicas.hooked)
        scale = 1 / job.microbatches if averaged else 1.0
        with job.replicas.backward() if job.replicas is not None else nullcontext():
            if job.pipelined:
                job.session.backward(outputs, gradients, scale)
            else:
                given = [_scaled(*pair, scale) for pair in zip(outputs, gradients, strict=True)]
                torch.autograd.backward(outputs, given)

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
        job = self._job("DistributedModel.register_comm_hook()")
        if self._replicas is None or not self._overlapping:
            raise UsageError("register_comm_hook() needs ddp=True and overlapping_allreduce=True")
        if not hasattr(callable, "__call__"):  # noqa: B004 -- the argument's name is the original's
            raise UsageError(f"register_comm_hook() takes a function, not {type(callable).__name__}")
        self._replicas.set_hook(state, callable)
        job.replicas = self._replicas
        self._cut.watch()

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
        job = self._job("DistributedModel.join()")
        if self._replicas is None:
            raise UsageError("join() needs ddp=True")
        if not enable or job.replicas is None:
            yield
            return
        with job.replicas.join(divide_by_initial_world_size, throw_on_early_termination):
            yield
            if not self.partitioned:
                raise UsageError("join(): this replica made no step; give each at least one batch")

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
        self._job("grad_norm()")
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
        self._job("clip_grad_norm_()")
        return nn.utils.clip_grad_norm_(list(self.parameters()), max_norm, norm_type, error_if_nonfinite, foreach)

    def to(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As torch's, on every rank. With more than one partition, a device is ignored until the model is partitioned:
        it may have no room for the whole model."""
        if not self._cut.pipelined or self.partitioned:
            return super().to(*args, **kwargs)
        _, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        given = {"dtype": dtype, "memory_format": memory_format}
        given = {name: value for name, value in given.items() if value is not None}
        return super().to(non_blocking=non_blocking, **given) if given else self

    # Returns its parts.

    @property
    def partitioned(self) -> bool:
        """True where it is known who owns what: from the first step on, with one partition from the start."""
        return self._cut.model is not None

    def partition_report(self) -> dict[str, Any]:
        """How the model was cut, on every rank: {"partition": {name of a module: its partition}, "stages":
        [{"partition", "time_us", "parameter_bytes", "memory_bytes", "out_bytes"}], "predicted_step_us", "bubble",
        "warning"}, and of the trace: "reads_data" and "draws", names of modules that let data decide and that draw
        random numbers, "ties", the modules that share each attribute, "notes", what could not be found out. Before
        partition: UsageError."""
        if not self.partitioned:
            raise UsageError("the model is partitioned at the first call of a step function; there is no report before")
        return self._cut.model.report

    def get_module(self) -> nn.Module:
        """The module that is wrapped."""
        return self.module

    def named_modules(self, memo: set | None = None, prefix: str = "", remove_duplicate: bool = True) -> Names:
        """As the wrapped module's."""
        return self.module.named_modules(memo, prefix, remove_duplicate)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Names:
        """As the wrapped module's: all parameters, those without a value on this rank included."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Names:
        """As the wrapped module's: all buffers, those without a value on this rank included."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of what this rank owns. Before partition: UsageError."""
        return self._local(self.named_parameters())

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this rank owns. Before partition: UsageError."""
        return (parameter for _, parameter in self.local_named_parameters())

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
        if self._cut.whole_everywhere:
            self._nothing_waits("state_dict()")
            return self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        self._job("state_dict()")
        state = self._cut.state().whole(gather_to_rank0)
        if destination is None and not prefix:
            return state
        destination = OrderedDict() if destination is None else destination
        destination.update((prefix + name, value) for name, value in state.items())
        return destination

    def local_state_dict(self) -> dict[str, Any]:
        """The state of what this rank owns: a partial dictionary, marked by the key `_smp_is_partial`.

        Errors:
            UsageError: before the model is partitioned, or inside a step function.
        """
        self._job("local_state_dict()")
        self._require_partitioned()
        return self._cut.state().local()

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
                partial one that comes before the model is partitioned is loaded when it is.
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
        if current.is_initialized():
            seeds.note_loaded_model(current.job())
        if not self._cut.whole_everywhere:
            self._job("load_state_dict()")
            if assign:
                raise UsageError("load_state_dict(assign=True) is not possible once the model is partitioned")
            self._cut.make_again()
            return self._cut.state().load(state_dict, strict, same_partition_load)
        waits = is_partial(state_dict) or self._cut.waiting or any(map(is_delayed, self.parameters()))
        if self._cut.pipelined and waits:
            if problem := saved_elsewhere(state_dict, self._job("load_state_dict()").session):
                raise UsageError(problem)
            self._cut.waiting.append((state_dict, strict, same_partition_load))
            return nn.modules.module._IncompatibleKeys([], [])
        loaded = self.module.load_state_dict(without_mark(state_dict), strict, assign)
        if assign:
            self._cut.watch()  # its parameters are others now
        return loaded

    def cpu(self) -> nn.Module:
        """Moves the model to the CPU, and with more than one partition brings it together: on every rank it is whole
        until the next step, and may be called like the plain one. Collective over the ranks of the pipeline.

        Errors:
            UsageError: inside a step function.
        """
        if not self._cut.whole_everywhere:
            self._job("cpu()")
            self._cut.take_back()
        return super().cpu()

    # Hooks.

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Has `hook(model, optimizer)` called once, in the first call of a step function: when the model is partitioned
        and before its first forward. After that step it is called at once.

        Args:
            hook: called on every rank. `optimizer` is the DistributedOptimizer, the latest of several, None if none.

        Returns:
            A handle; its `remove()` takes the hook back.
        """
        return self._register(self._post_partition_hooks, hook, at_once=self._cut.routed)

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Has `hook(model, optimizer)` called at the end of every call of a step function, on every rank.

        Args:
            hook: see `register_post_partition_hook`.

        Returns:
            A handle; its `remove()` takes the hook back.
        """
        return self._register(self._post_step_hooks, hook)

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_YET:
            raise AttributeError(f"DistributedModel.{name} is not available yet")
        return super().__getattr__(name)

    # Inside.

    def _nothing_waits(self, what: str) -> None:
        if self._cut.waiting:
            raise UsageError(
                f"{what} while a partial state dict waits for the model to be partitioned: call it after the first step"
            )

    def _register(self, hooks: dict, hook: Hook, at_once: bool = False) -> RemovableHandle:
        if not callable(hook):
            raise UsageError(f"a hook is called with the model and the optimizer; {type(hook).__name__} cannot be")
        handle = RemovableHandle(hooks)
        if at_once:
            hook(self, self._optimizer())
        else:
            hooks[handle.id] = hook
        return handle

    def _run_hooks(self, hooks: dict) -> None:
        for hook in list(hooks.values()):
            hook(self, self._optimizer())

    def _run_post_partition_hooks(self) -> None:
        self._run_hooks(self._post_partition_hooks)

    @contextmanager
    def _backwards_watched(self) -> Iterator[None]:
        """Around a step."""
        job = current.job()
        hooked = self._replicas is not None and self._replicas.hooked  # then nothing is averaged here
        if self._backward_watch.over or hooked or not job.leads:
            yield
            return
        parameters = list(self.module.parameters())
        self._backward_watch.begin_step(parameters, job.session.backwards())
        yield
        self._backward_watch.end_step(parameters, job.session.backwards())

    def _leave_step(self) -> None:
        """A step has ended well."""
        self._run_hooks(self._post_step_hooks)

    def _optimizer(self) -> torch.optim.Optimizer | None:
        optimizers = current.job().optimizers
        return optimizers[-1].optimizer if optimizers else None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Does what `to`, `half`, `double`, ... do: of what other ranks own there is only the metadata to change."""
        cut = self._cut
        if cut.whole:
            cut.model.conversions += 1
        if cut.whole_everywhere or cut.whole:
            return super()._apply(fn, recurse)
        with only_own(cut.model) as foreign:
            super()._apply(fn, recurse)
        for name, tensor, owner in foreign:
            like = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (like.dtype, like.device) != (tensor.dtype, tensor.device):
                whole = torch.empty(tensor.shape, dtype=like.dtype, device=like.device)
                current.session().release(tensor, name, owner, whole)
        cut.model.conversions += 1
        return self

    def _job(self, what: str) -> current.Job:
        job = current.outside_step(what)
        if job.model is not self:
            raise UsageError(f"{what} of a DistributedModel whose job was shut down")
        return job

    def _check_called(self, what: str) -> None:
        if not self._cut.pipelined:
            return
        if current.job().model is not self:
            raise UsageError(f"{what}, but its job was shut down")
        if not current.in_step():
            raise UsageError(
                f"{what} outside a step; with more than one partition call it inside a function decorated with "
                "@lamina.step"
            )

    def _local(self, named: Names) -> Names:
        self._require_partitioned()
        return ((name, value) for name, value in named if self._cut.model.owns(name))

    def _require_partitioned(self) -> None:
        if not self.partitioned:
            raise UsageError("the model is partitioned at the first call of a step function; nothing is local before")


def distribute(module: nn.Module, **options: Any) -> DistributedModel:
    """`DistributedModel(module, **options)`."""
    return DistributedModel(module, **options)


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(f"DistributedModel takes an nn.Module, not {type(module).__name__}")
    if isinstance(module, DistributedModel):
        raise UsageError("this is a DistributedModel already")
    if isinstance(module, torch.jit.ScriptModule) and current.job().pipelined:
        raise UsageError(
            "the whole model is one ScriptModule, which cannot be cut: script or trace parts of it instead"
        )
    for name, part in module.named_modules():
        if isinstance(part, _torch_wrappers()):
            what = f"{name}, which is in torch's" if name else "the model"
            raise UsageError(f"take {what} out of its {type(part).__name__} first: lamina sees to data parallelism")


def _torch_wrappers() -> tuple[type, ...]:
    """torch's own data-parallel modules; nobody has one of FSDP without its import, which takes long."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers = [getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name)]
    return (nn.parallel.DistributedDataParallel, nn.DataParallel, *wrappers)


def _scaled(output: torch.Tensor, gradient: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    if gradient is not None:
        return gradient * scale
    return torch.full_like(output, scale) if output.numel() == 1 else None  # torch says what is missing
