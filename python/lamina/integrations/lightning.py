# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning's Trainer over partitions: `Trainer(strategy="lamina")`, once this module is imported.

Lightning's loop calls `training_step` and then the backward. Here both are one step of lamina's: its body calls
`training_step` with each microbatch and runs the backward of its loss, and Lightning gets the mean. All ranks of a
pipeline run the loop; the leading one runs the bodies.
"""

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, partialmethod
from importlib.util import find_spec
from typing import Any

import torch

import lamina
from lamina import _lamina
from lamina.errors import UsageError
from lamina.integrations.logged import Logged, over_microbatches
from lamina.integrations.results import joined
from lamina.job import current

# One library in two distributions, whose classes differ: the one that the script has imported, or else has.
if "pytorch_lightning" in sys.modules or find_spec("lightning") is None:
    import pytorch_lightning as pl
    from pytorch_lightning.loops.optimization.automatic import Closure
    from pytorch_lightning.utilities.data import extract_batch_size
    from pytorch_lightning.utilities.model_helpers import is_overridden
else:
    import lightning.pytorch as pl
    from lightning.pytorch.loops.optimization.automatic import Closure
    from lightning.pytorch.utilities.data import extract_batch_size
    from lightning.pytorch.utilities.model_helpers import is_overridden

_PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")
_CALLBACKS = ("StochasticWeightAveraging", "WeightAveraging", "ModelPruning")  # look at the whole model's parameters
_BEFORE = "on_before_backward"
_REDUCTIONS: dict[str, Callable] = {
    "mean": lambda values: (values if values.is_floating_point() else values.to(torch.get_default_dtype())).mean(0),
    "sum": lambda values: values.sum(0),
    "min": lambda values: values.amin(0),
    "max": lambda values: values.amax(0),
}


class _Hook(str):
    """The name of a method of the module: a call of the model with it is a call of the method."""


class LaminaStrategy(pl.strategies.ParallelStrategy):
    """Trains a LightningModule over the ranks of a job.

    Args:
        checkpoint_io, precision_plugin: Lightning's own.
        **configuration: as `lamina.init` takes it, with `ddp`. Nothing where the script has called `lamina.init`.

    Errors:
        UsageError: what of Lightning is not there, when the Trainer is made or gets its module.
    """

    restore_checkpoint_after_setup = True
    global_rank = property(lambda _: lamina.rank())
    local_rank = property(lambda _: lamina.local_rank())
    world_size = property(lambda _: lamina.size())
    # Copies of the model read shares of the data; the ranks of one copy read the same.
    is_distributed = property(lambda _: lamina.dp_size() > 1)
    distributed_sampler_kwargs = property(lambda _: {"num_replicas": lamina.dp_size(), "rank": lamina.dp_rank()})
    root_device = property(lambda _: lamina.device())

    def __init__(self, checkpoint_io: Any = None, precision_plugin: Any = None, **configuration: Any):
        super().__init__(checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        lamina.init({"ddp": True, **configuration} if configuration or not lamina.is_initialized() else {})
        self._logged: dict[int, list] = {}  # by microbatch

    def _configure_launcher(self) -> None:
        """Lightning's call when the Trainer is complete. Ranks are started by `lamina run`."""
        config, precision = current.session().config, self.precision_plugin.precision
        there, own = self.parallel_devices[0].type, lamina.device()
        if there != own.type:
            raise UsageError(
                f"Lightning's accelerator is {there}, but this rank computes on {own}: say the same in "
                "Trainer(accelerator=...) and LaminaStrategy(device=...)"
            )
        if precision not in _PRECISIONS:
            raise UsageError(f"precision={precision!r} is not there with lamina's strategy: take one of {_PRECISIONS}")
        if isinstance(self.precision_plugin, pl.plugins.MixedPrecision):  # of Lightning's it is CUDA's or the host's
            self.precision_plugin.device = own.type
        if self._layer_sync is not None:
            raise UsageError("sync_batchnorm is not there with lamina's strategy: a BatchNorm sees microbatches")
        if (lamina.dp_size() > 1 and not config.ddp) or config.tensor_parallel_degree > 1:
            raise UsageError("lamina's strategy needs ddp for copies of the model; tensor_parallel_degree is not there")

    def setup(self, trainer: Any) -> None:
        """Wraps the module, and has its methods run with microbatches."""
        module, job = self.lightning_module, current.job()
        _check(trainer, module)
        self.accelerator.setup(trainer)
        if not job.has_model:
            self.precision_plugin.convert_module(module)
            self.model_to_device()
            lamina.DistributedModel(module)
        elif job.model.module is not module:
            raise UsageError("a job trains one module: lamina.shutdown() ends it, and another strategy begins another")
        self.model, module.trainer = job.model, weakref.proxy(trainer)  # lamina looks into what modules hold
        module.forward, module.log = partial(self._forward, module.forward), partial(self._log, module.log)
        if trainer.state.fn == "fit":
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            loop._make_closure = partial(_make_closure, loop)
            self.setup_optimizers(trainer)
            self.optimizers = [lamina.DistributedOptimizer(optimizer) for optimizer in self.optimizers]
        self.setup_precision_plugin()

    def teardown(self) -> None:
        """Gives the module its methods back. Each rank keeps its part of it."""
        for name in ("forward", "log"):
            vars(self.lightning_module or self).pop(name, None)
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _forward(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the module's forward."""
        if args and type(args[0]) is _Hook:
            return getattr(self.lightning_module, args[0])(*args[1:], **kwargs)
        return forward(*args, **kwargs)

    def _log(self, log: Callable, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Takes the place of the module's `log`. In a step, values wait for those of the other microbatches."""
        if lamina.is_tracing():  # tensors without values
            return
        if not _lamina.in_step():
            log(name, value, *args, **options)
            return
        if not isinstance(value, (torch.Tensor, int, float)):
            raise UsageError(
                f"self.log({name!r}, ...) of a {type(value).__name__} is not there in a step: return what updates it, "
                "and update and log it in on_train_batch_end or on_validation_batch_end, which run on all ranks"
            )
        arguments = inspect.signature(log).bind(name, value, *args, **options).arguments
        self._logged[_lamina.microbatch()].append(arguments)

    @lamina.step
    def _step(self, hook: str, batch: Any, *rest: Any) -> tuple[Any, Logged]:
        """Calls a method of the module with a microbatch."""
        logged = self._logged[_lamina.microbatch()] = []
        kind = {"training": "train", "validation": "val"}.get(name := hook.removesuffix("_step"), name)
        with getattr(self.precision_plugin, f"{kind}_step_context")():
            output = self.model(_Hook(hook), batch, *rest)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if kind == "train" and isinstance(loss, torch.Tensor):
            self.model.backward(loss / self.lightning_module.trainer.accumulate_grad_batches)
        samples = extract_batch_size(batch) if logged else 1
        return output, Logged(samples, [(each, torch.as_tensor(each.pop("value"))) for each in logged])

    def _run(self, hook: str, *args: Any) -> Any:
        output, logged = self._step(hook, *args)
        self._logged.clear()
        for arguments in over_microbatches(logged):
            self.lightning_module.log(**arguments)
        return joined(output)

    training_step = partialmethod(_run, "training_step")
    validation_step = partialmethod(_run, "validation_step")
    test_step = partialmethod(_run, "test_step")
    predict_step = partialmethod(_run, "predict_step")

    def backward(self, closure_loss: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Nothing is left to do but to call the hooks."""
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def optimizer_step(self, optimizer: Any, closure: Callable, model: Any = None, **kwargs: Any) -> Any:
        """Runs the step, and then the update."""
        result = self.precision_plugin._wrap_closure(self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients add up on each copy of the model meanwhile."""
        with self.model.no_sync():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's, on all ranks."""
        return self.model.state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads what any strategy has saved."""
        self.model.load_state_dict(checkpoint["state_dict"], strict=strict)

    def model_to_device(self) -> None:
        """Tells modules of Lightning's where they are, and moves what is in metrics. Parameters and buffers go there
        when the model is cut, so that a rank has room only for its part."""
        for each in self.lightning_module.modules():
            if isinstance(each, pl.LightningModule):
                each._device = self.root_device
            if next(itertools.chain(each.parameters(), each.buffers()), None) is None:
                each.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        lamina.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Gives all ranks what that one has."""
        return lamina.allgather(obj, lamina.WORLD)[src]

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all copies of the model along a new axis."""
        if group is not None or sync_grads:
            raise UsageError("all_gather() with a group, or with gradients, is not there with lamina's strategy")
        return torch.stack(lamina.allgather(tensor.detach().cpu(), lamina.DP_GROUP)).to(tensor.device)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, sum, minimum or maximum over the copies of the model."""
        operation = str(reduce_op or "mean").lower().rpartition(".")[2].replace("avg", "mean")
        return _REDUCTIONS[operation](self.all_gather(tensor, group)) if isinstance(tensor, torch.Tensor) else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Asks all ranks whether all say so, or any."""
        decisions = lamina.allgather(bool(decision), lamina.WORLD)
        return min(decisions) if all else max(decisions)


def _check(trainer: Any, module: Any) -> None:
    """UsageError for what a module or a callback needs that is not there."""
    before = is_overridden(_BEFORE, module) or any(is_overridden(_BEFORE, each) for each in trainer.callbacks)
    kinds = {kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__}
    missing = {
        "manual optimization (automatic_optimization = False), and with it several optimizers,": (
            not module.automatic_optimization
        ),
        "torch.compile() of the LightningModule": module._compiler_ctx is not None,
        "backward() of a LightningModule's own": is_overridden("backward", module),
        f"{_BEFORE}(): the backward is a part of the step, and": before,
        "a callback that looks at the whole model's parameters": kinds.intersection(_CALLBACKS),
    }
    if found := [what for what, is_used in missing.items() if is_used]:
        raise UsageError(f"{found[0]} is not there with lamina's strategy")


def _make_closure(loop: Any, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
    """Lightning's closure in another order: gradients are zeroed before the step, which makes the new ones."""
    zero_grad, backward = loop._make_zero_grad_fn(batch_idx, optimizer), loop._make_backward_fn(optimizer)

    def step() -> Any:
        if zero_grad is not None:
            zero_grad()
        return loop._training_step(kwargs)

    return Closure(step, backward)


pl.strategies.StrategyRegistry.register("lamina", LaminaStrategy, description="partitions, copies and shards")
