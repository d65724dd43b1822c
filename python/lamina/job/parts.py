# SPDX-License-Identifier: Apache-2.0
"""Parts that a job may have, as the packages below theirs see them. Each of these classes does nothing: a job has it
while it has no other. Classes that do something are derived from it, in their own packages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from lamina import _lamina


class Model:
    """The model that a job trains: none, without modules and parameters.

    Attributes:
        module: the one that is wrapped.
    """

    module: nn.Module

    def __init__(self):
        self.module = nn.Module()

    @property
    def partitioned(self) -> bool:
        """True where it is known who owns what of it."""
        return False

    @property
    def backwards(self) -> _lamina.Backwards | None:
        """Its own backwards, which multiply by the loss scale."""
        return None

    @property
    def steps(self) -> int:
        """Its steps that have ended on this rank."""
        return 0

    def modules(self) -> Iterator[nn.Module]:
        """As torch's."""
        return iter(())

    def parameters(self) -> Iterator[nn.Parameter]:
        """As torch's."""
        return iter(())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch's."""
        return iter(())

    def in_step(self) -> dict[str, Any]:
        """Returns what the engine is told of the model in a step; see `Session.run_step`."""
        return {}

    def end_step(self) -> None:
        """A step has ended well."""


class PartitionedModel(Protocol):
    """A model that is cut: who owns what of it.

    Attributes:
        report: how it was cut.
        sharding: the engine's, where parameters are sharded.
    """

    report: dict[str, Any]
    sharding: _lamina.Sharding | None

    @property
    def table(self) -> _lamina.ParameterTable:
        """The table of who holds what of its tensors, as they are now."""

    @property
    def whole_everywhere(self) -> bool:
        """True where each rank has all of it. Alike on all ranks."""

    def tensors(self) -> list[tuple[str, torch.Tensor, int]]:
        """(name, tensor, owner) of every parameter and buffer, each once."""

    def owns(self, name: str) -> bool:
        """True where this rank owns what has that name in a state dict."""

    def home_of(self, name: str) -> str:
        """Where what has that name lives, for messages."""

    def elsewhere(self, module: nn.Module) -> int | None:
        """The partition of a module that another rank owns, None for any other module."""


class Optimizer(Protocol):
    """A DistributedOptimizer of a job.

    Attributes:
        optimizer: torch's.
        parameters: the engine's part of it.
    """

    optimizer: torch.optim.Optimizer
    parameters: _lamina.LocalParameters

    def trim(self, model: PartitionedModel) -> None:
        """Makes its groups this rank's part of the model."""

    def settle(self, model: PartitionedModel | None) -> None:
        """Makes what a program has put into the groups since the model was cut this rank's part; all ranks do."""

    def follow(self) -> None:
        """Gives masters the values of parameters that have changed."""

    def load_what_waits(self) -> None:
        """Loads a state that came before the cut."""

    def is_whole(self) -> bool:
        """True where no parameter has left its groups, and none is another tensor than the model's."""

    def holders(self) -> list[torch.Tensor]:
        """Lists what has the gradients of this rank: parameters and shards of the model. All ranks do."""

    def parameter_of(self, local: torch.Tensor) -> torch.Tensor:
        """The parameter of the model that a tensor of the groups is, or stands for."""

    def require_own_step(self) -> None:
        """UsageError for a step that it makes apart from ours, with parts of parameters in its groups."""


class CallContext:
    """State of a thread under which modules are called, besides what calls know of anyway: it goes along with calls of
    modules on other ranks, and what they change of it comes back."""

    def calling(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Inside, this thread calls these modules, in this order, on another rank."""
        return nullcontext()

    def told(self, number: Callable[[nn.Module], int]) -> tuple | None:
        """The state that goes along with the call that this thread makes now, of which `marshal` knows all; None where
        there is none.

        Args:
            number: the number of a module of the model.
        """
        return None

    def served(self, told: Any, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Inside, a call is run under the state that `told` gave on another rank.

        Args:
            modules: those of the model, by number.
        """
        return nullcontext()


class Resumption(Protocol):
    """A checkpoint that is to be loaded when the model is cut.

    Attributes:
        partition: the partition of each module then, by name.
        has_optimizers: whether states of optimizers are in it.
    """

    partition: dict[str, int]
    has_optimizers: bool

    def load(self) -> None:
        """Loads it; collective over the world."""


class Life:
    """The life of a model, which is whole until it is cut.

    Attributes:
        model: who owns what of it; None before it is cut.
        whole: whether it was brought together again, until the next step.
        resumption: a checkpoint that is to be loaded at the cut.
    """

    model: PartitionedModel | None = None
    whole = False
    resumption: Resumption | None = None

    @property
    def whole_everywhere(self) -> bool:
        """True where each rank has all of the model, so that nobody is asked for values. Alike on all ranks."""
        return True

    def enter_step(self) -> Any:
        """Cuts the model, in its first step. Returns a FirstCall where its first call is to do that."""
        return None

    def make_again(self) -> None:
        """Ends it where the model was brought together again."""

    def unrouted(self) -> AbstractContextManager[None]:
        """Between steps: inside, calls of modules, and what they read and set, are torch's own."""
        return nullcontext()


class Routing:
    """The way of calls of a model's modules."""

    def name_turns(self, recorded: bool = True) -> None:
        """Has a timeline show the modules that this rank calls itself, or not."""

    def forget_hooks(self) -> None:
        """Some hooks of calls are no more."""


class Gradients:
    """The gradients of a model."""

    def watch(self) -> None:
        """Registers gradient hooks on the current parameters, for data-parallel averaging and loss scaling: a backward
        may begin anywhere. Cheap where nothing has changed. Does nothing before the cut."""

    def complete(self, what: str) -> None:
        """Before gradients are looked at: averages what waits for a later pass; collective over the replicas, all of
        whom have as much. UsageError where that is too early; `what` names the caller."""

    def see_to_norms(self) -> None:
        """Has torch's norms of gradients be those of the whole model, without the loss scale, once it is cut; of what
        optimizers have in the place of its parameters, too."""


class Replicas:
    """The copies of a model that read different data, over which its gradients are averaged.

    Attributes:
        averages: whether there are any.
        accumulates: whether gradients may wait for a later pass.
        reducer: the engine's.
    """

    averages = False
    accumulates = False
    reducer: _lamina.Reducer | None = None

    @property
    def gradients_wait(self) -> bool:
        """True where gradients of earlier passes are kept for the next one."""
        return False

    @property
    def are_joining(self) -> bool:
        """True within `model.join()`, which copies of the model may have left."""
        return False

    def share_batches(self) -> None:
        """The copies have the same batches on purpose."""

    def see_batch(self, values: Any) -> None:
        """Looks at what the model is about to be trained on, before the first gradients are averaged."""

    def note_call(self) -> int:
        """The model is called. Returns the call's number."""
        return 0

    def note_forward(self, call: int, output: Any) -> None:
        """Notes that the call has returned `output`."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients stay with this copy, and add up."""
        return nullcontext()

    def watch(self, parameters: list[torch.Tensor]) -> None:
        """From now on a backward that nobody announces is noticed, by the gradients it leaves in these parameters."""

    def let_go(self) -> None:
        """Holds no parameters until the next `watch`."""

    def add(self, beside: list[torch.Tensor]) -> None:
        """Has the gradients of parameters that are not the model's averaged, too."""

    def complete(self, what: str) -> None:
        """Averages what waits for a later pass; `what` names the caller. Collective over the copies."""

    def before_update(self) -> None:
        """Does so before an optimizer's step, of which the other copies hear."""


class Recording:
    """A recording of the run, to be compared with another one.

    Attributes:
        sees_calls: whether calls of modules are recorded.
    """

    sees_calls = False

    def begin_step(self) -> None:
        """Notes that a step function is called."""

    def begin_call(self) -> None:
        """Notes that a module is called."""

    def record_reads(self, name: str) -> None:
        """Records what the call of a module that has begun would find in the variables that its code reads."""

    def note_cut(self) -> None:
        """Notes that the model is cut, and has its values."""

    def see_results(self, outputs: list[Any]) -> None:
        """Takes what the body of a step returned for each microbatch."""

    def end_step(self) -> None:
        """Notes that a step function has done its work."""

    def end(self) -> None:
        """Records what is left, where the job ends."""


class StepCheck:
    """A comparison of a step with the plain model's.

    Attributes:
        is_due: whether this step is compared.
        leads: whether this rank calls the plain model.
        sees_calls: whether this thread works for the microbatch that is compared.
    """

    is_due = False
    leads = False
    sees_calls = False

    def look_for_room(self, root: nn.Module) -> None:
        """Before a step: gives up where the whole model has no room on some rank that leads."""

    def take_values(self, root: nn.Module, model: PartitionedModel | None) -> None:
        """A step begins: the ranks that lead get values for the plain model."""

    def run_plainly(self, root: nn.Module, called: Any) -> None:
        """On a rank that leads: calls the model as the body of a step does."""

    def begin_step(self, model: PartitionedModel) -> None:
        """The model is cut: from now on gradients of this rank's parameters are recorded."""

    def see_outputs(self, output: Any) -> None:
        """Takes what the call returned to the body that `run_plainly` had a call of."""

    def see_backward(self, tensors: Iterable[torch.Tensor]) -> None:
        """A body begins a backward of these."""

    def end_step(self) -> None:
        """Compares; collective over the world."""
