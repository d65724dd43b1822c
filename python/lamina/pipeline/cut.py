# SPDX-License-Identifier: Apache-2.0
"""The cut of a job's model: made in the first step, taken back for a while by `cpu()`; the way of its calls since."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lamina import _lamina
from lamina.calls.remote_call import RemoteCalls
from lamina.errors import ConfigError, DesyncError, UsageError, refusal
from lamina.job import current, parts
from lamina.libraries import hugging_face
from lamina.model import shards
from lamina.model.partitioned import PartitionedModel, bring_together, let_go
from lamina.model.statistics import Statistics
from lamina.modules import rng_streams, runs
from lamina.modules.slots import Slots
from lamina.pipeline import updates
from lamina.pipeline.before_cut import BeforeCut
from lamina.pipeline.first_call import Called, FirstCall
from lamina.pipeline.life import Life, replaces
from lamina.saved_state.state_dicts import ModelState
from lamina.shared_state.watch import Watch
from lamina.tensor_parallel import recorded, turns, unslicing
from lamina.torch_patches import (
    clipping,
    compiled,
    module_call,
    sequential,
)
from lamina.tracing.proposal import Tracer
from lamina.tracing.trace import TraceOptions
from lamina.util import pytree


class Cut:
    """The life of a job's model: whole at first, then cut, then one whose calls go to the owners of its modules.

    Args:
        module: says which model is wrapped.
        trace_options: how it is traced.
        when_routed: called once, when its calls go to the owners.

    Attributes:
        model: who owns what of it; None before it is cut.
        routed: whether its calls go to the owners.
        whole: whether it was brought together again, until the next step.
        slots: where its parameters and buffers are; None before the first step.
        shared_state: watches the state of the script around it.
        calls: those of its modules between ranks, while its calls go to the owners of several partitions.
        pipelined: whether its calls are to go to several ranks.
        resumption: a checkpoint that is to be loaded at the cut.
        waiting: partial states that came before the cut: what `ModelState.load` takes.
        arguments: of the DistributedModel, which are to be the same on all ranks.
        statistics: of the model's BatchNorms; None before it is cut.
        module: says which model is wrapped.
    """

    def __init__(
        self,
        module: Callable[[], nn.Module],
        trace_options: TraceOptions,
        when_routed: Callable[[], None],
    ):
        self.model: PartitionedModel | None = None
        self.routed = False
        self.whole = False
        self._recut: Callable[[], None] | None = None  # cuts layers again that are whole for a while
        self.waiting: list[tuple[Mapping[str, Any], bool, bool]] = []
        self.resumption: Any = None
        self.arguments: dict[str, Any] = {}
        self.statistics: Statistics | None = None
        self.module = module
        self.pipelined = current.job().pipelined
        self._trace_options = trace_options
        self._when_routed = when_routed
        self._announced = False  # that it is cut
        self._waited: list[str] = []  # names of modules that are
        self.slots: Slots | None = None
        self._before: BeforeCut | None = None
        self._compiler_is_seen = False
        self.shared_state = Watch()
        self.calls: RemoteCalls | None = None
        self._interception: tuple | None = None  # of calls of modules: what `module_call.install` takes
        self._routing = ExitStack()  # what ends it
        current.job().on_end.callback(self._end_routing)

    @property
    def whole_everywhere(self) -> bool:
        """True where each rank has all of the model, so that nobody is asked for values: until it is cut, and after
        that where it is in one piece. Alike on all ranks."""
        return self.model is None or self.model.whole_everywhere

    def enter_step(self) -> FirstCall | None:
        """Cuts the model and routes its calls, the first time; collective over the world. A model that is to be traced
        or compared is cut at its first call: the ranks that lead get what lets their step do so, the others wait for
        them here. One that is compared in a later step is called plainly where it would be cut."""
        job = current.job()
        job.step_check.look_for_room(self.module())
        check = job.step_check
        self.share_written()
        self._watch_flags(job.session)
        config = job.session.config
        options = self._trace_options if config.auto_partition and not config.skip_tracing else None
        if not self.pipelined:
            self._make_and_route(None)
            return self._compare_at_first_call(check) if check.is_due else None
        waits = check.is_due or (self.model is None and options is not None)
        self._before = BeforeCut(self.module()) if waits else None
        if check.is_due and self.model is not None:
            self._unroute()
        if waits and job.leads:
            return FirstCall(job.session, self.module(), options, self._make_and_route, self._before)
        try:
            self._make_and_route(None)
        except (ConfigError, UsageError) as error:
            if waits and not isinstance(error, DesyncError):
                # The leading rank is in it, and ends it with this error.
                job.session.run_step(job.microbatches, None, lambda outputs, _: outputs)
            raise
        return None

    def make(self, tracer: Tracer | None = None) -> None:
        """Cuts the model, the first time, with what the tracer finds; collective over the world."""
        if self.model is None:
            current.session().begin_life(Life(self, tracer))
            current.job().recording.note_cut()

    def hooked(self) -> dict[int, module_call.Begin]:
        """Functions that begin a call of each module that has hooks, by id(module)."""
        job = current.job()
        session, recording, check, tree = job.session, job.recording, job.step_check, self.model.tree

        def begin(node: int, remote: bool, given: tuple) -> _lamina.HookedCall:
            recording.begin_call()
            tensors = pytree.tensors(given) if session.hooks_want_tensors else []
            begin_call = functools.partial(session.begin_call, node, remote)
            if turns.are_taken():
                call = begin_call((), False)
            elif not (recording.sees_calls or check.sees_calls) or not recorded.knows(tree.modules[node]):
                call = begin_call(tensors)
            else:
                call = recorded.begin(tree.modules[node], tensors, session, begin_call)
            recording.record_reads(tree.names[node])
            return call

        return {id(tree.modules[node]): functools.partial(begin, node) for node in session.hooked_modules(tree.names)}

    def see_to_norms(self) -> None:
        """Has torch's norms of gradients be those of the whole model, without the loss scale, once it is cut; of what
        optimizers have in the place of its parameters, too."""
        job = current.job()
        scaled = job.loss_scale is not None and job.loss_scale.is_on
        aside = scaled or replaces(job) or job.replicas.accumulates
        if self.model is not None and (aside or not self.model.whole_everywhere):
            clipping.install(lambda: self.model.table, _parameter_of, shards.holder, shards.measured, self.complete)
            job.on_end.callback(clipping.remove)

    def watch(self) -> None:
        """Registers gradient hooks on the current parameters, for data-parallel averaging and loss scaling: a backward
        may begin anywhere. Cheap where nothing has changed. Does nothing before the cut."""
        job = current.job()
        scaled = job.leads and job.loss_scale is not None and job.loss_scale.is_on
        if self.model is None or not (job.replicas.averages or scaled):
            return
        parameters = self.model.own_parameters()
        job.replicas.watch(parameters)
        if scaled:
            job.model.backwards.watch(parameters, self.model.sharding is None and not self.pipelined)

    def share_written(self) -> None:
        """Gives all ranks what a program wrote to parts of parameters, which stand in optimizers, before the model is
        used."""
        for optimizer in current.job().optimizers:
            optimizer.parameters.share_written()

    def let_go(self) -> None:
        """Holds no parameters in the engine until the next `watch`."""
        job = current.job()
        if self.model is not None:
            self.model.forget_table()
            job.model.backwards.watch([], False)
            job.replicas.let_go()

    def complete(self, what: str) -> None:
        """Before gradients are looked at: averages what waits for a later pass; collective over the replicas, all of
        whom have as much. UsageError where that is too early; `what` names the caller."""
        if self.model is not None:
            self.watch()
            current.job().replicas.complete(what)

    def before_update(self, closure: Callable[[], Any] | None = None) -> Callable[[], Any] | None:
        """Does so before an optimizer's step, of which the other replicas hear. Returns its closure, after which there
        may be more to average."""
        if self.model is not None:
            self.watch()
            current.job().replicas.before_update()

        def closed() -> Any:
            loss = closure()
            self.complete("optimizer.step(closure)")
            return loss

        return closed if closure is not None else None

    def see_to_updates(self) -> None:
        """Has steps of optimizers that are no DistributedOptimizer average what is left over, too."""
        current.job().on_end.callback(register_optimizer_step_pre_hook(_before_step).remove)

    def take_back(self) -> None:
        """Gives every rank the whole model, on the CPU, to be called like the plain one, until `make_again`; collective
        over the ranks that have one copy of the model."""
        if current.job().sliced and self._recut is None:
            self._recut = unslicing.make_whole(self.model.tree.root, self.model.session)
            self.model.forget_table()
        if self.pipelined:
            bring_together(self.model)
        self._unroute()

    def _unroute(self) -> None:
        """Calls are the plain model's until `make_again`."""
        self._end_routing()
        self.whole = True

    @contextmanager
    def unrouted(self) -> Iterator[None]:
        """Between steps: meanwhile calls of modules, and what they read and set, are torch's own."""
        self._unroute()
        try:
            yield
        finally:
            self.make_again()

    def make_again(self) -> None:
        """Ends what `take_back` began."""
        if not self.whole:
            return
        self.whole = False
        recut, self._recut = self._recut, None
        if recut is not None:
            recut()
            self.model.forget_table()
        let_go(self.model)
        if self.routed:
            self._intercept()
        self.name_turns(_lamina.records_events(current.session()))

    def slice_again(self) -> None:
        """Ends it where it has made layers whole; routes that are left for another reason stay so."""
        if self._recut is not None:
            self.make_again()

    def name_turns(self, recorded: bool = True) -> None:
        """Has a timeline show the modules that this rank calls itself, or not."""
        if self.routed and self.pipelined:
            module_call.name_turns(self.model.whole_parts() if recorded else {})

    def state(self) -> ModelState:
        """The state of the model, which is cut."""
        return ModelState(self.model)

    def _compare_at_first_call(self, check: parts.StepCheck) -> FirstCall:
        """Has a model of one partition called plainly, too, where a body calls it first."""

        def compare(_: Tracer, called: Called | None) -> None:
            if check.leads:
                check.run_plainly(self.module(), called)
            self.make_again()

        check.take_values(self.module(), self.model)
        check.begin_step(self.model)
        self._unroute()
        return FirstCall(current.session(), self.module(), None, compare, None)

    def _make_and_route(self, tracer: Tracer | None, called: Called | None = None) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.bring(current.session())
        check = current.job().step_check if self.pipelined else parts.StepCheck()
        check.take_values(self.module(), self.model)
        if check.leads:
            check.run_plainly(self.module(), called)
        self.make(tracer)
        check.begin_step(self.model)
        self.make_again()
        if not self._compiler_is_seen:
            is_sharded = self.model.sharding is not None
            self._compiler_is_seen = compiled.install(current.job().on_end, self.pipelined, is_sharded)
        if not self.routed:  # one partition, whose first step this is
            self.route()
        if not self._announced:
            self._announced = True
            self._when_routed()
        self.settle()
        module_call.tell_compiler()
        if before is not None:
            before.finish(self.model.elsewhere, _in_turns(current.session()))

    def settle(self) -> None:
        """Snapshots gradients and BatchNorm statistics at the start of a step, so that the step reproduces the plain
        loop."""
        if not self.pipelined:
            return
        session = current.session()
        if session.config.deterministic_server:
            own = [parameter for name, parameter in self.module().named_parameters() if self.model.owns(name)]
            session.set_order(own, not self.statistics.are_all_buffers())
        session.set_statistics(self.statistics.rows())

    def forget_hooks(self) -> None:
        """Some hooks of calls are no more."""
        if self._interception is not None:
            remote, route, streamed, anywhere, _, whole = self._interception
            self._interception = remote, route, streamed, anywhere, self.hooked(), whole
            self._install_calls()
            self.name_turns(_lamina.records_events(current.session()))

    def route(self) -> None:
        """Has calls of modules go to their owners."""
        session, model = current.session(), self.model
        filled = model.tree.filled()
        own_stream = rng_streams.agree([id(each) in filled.starting_stream for each in model.tree.modules], session)
        if self.pipelined:
            late = updates.late(model)
            waited = [id(each) in filled.waited_for or id(each) in late for each in model.tree.modules]
            model.runs = runs.find(model.tree, model.owners, list(model.anywhere.values()), own_stream, waited)
            called_at_once = [(run.name, run.owner, run.streams) for run in model.runs]
            session.set_model(model.cut, model.tree.names, own_stream, waited, called_at_once)
            self._waited = list(itertools.compress(model.tree.names, waited))
        streamed = list(itertools.compress(model.tree.modules, own_stream))
        whole = updates.whole(model) if self.pipelined else []
        self._interception = (model.remote(), self.call_remote, streamed, model.anywhere, self.hooked(), whole)
        self._intercept()
        self.routed = True
        if _lamina.records_events(session):
            self.name_turns()

    def _watch_flags(self, session: _lamina.Session) -> None:
        """Which tensors are the model's in this step: others may have taken their places since the last one."""
        if not self.pipelined:
            return
        if self.slots is None:
            self.slots = Slots(self.module())
        if self.slots.watch(session) and self.calls is not None:
            self.calls.forget_parts()

    def _intercept(self) -> None:
        self._install_calls()
        if self.pipelined:
            model = self.model
            called = runs.calls(model.runs, model.partition, compiled.outside(self.call_remote))
            sequential.install(called, self._routing)
            self._routing.callback(self.shared_state.remove)
            self.shared_state.install(
                self.module(),
                current.job().model,
                list(zip(model.tree.names, model.tree.modules, model.owners, strict=True)),
                model.partition,
                model.elsewhere,
                waited=self._waited,
                homes=model.homes,
                in_turns=functools.partial(_in_turns, current.session()),
            )
            self.calls = RemoteCalls(model, self.slots, self.shared_state)

    def _install_calls(self) -> None:
        remote, _, *others = self._interception
        if remote or any(others):
            module_call.install(*self._interception, hooks_see_streams=current.session().hooks_want_tensors)

    def _end_routing(self) -> None:
        """Calls, attributes and names are the plain model's again."""
        module_call.remove()
        self._routing.close()
        self.shared_state, self.calls = Watch(), None

    def call_remote(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not current.in_step():
            owner = current.session().translate("partitions", self.model.callee_owner(number))
            raise refusal("called-elsewhere", self.model.callee_name(number), owner)
        output = self.calls.call(current.session(), number, args, kwargs)
        hugging_face.collect(self.model.callee(number), args, output)
        return output


def _in_turns(session: _lamina.Session) -> bool:
    """True where several microbatches may be under way."""
    return session.config.active_microbatches != 1 and session.microbatches > 1


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """Before a step of an optimizer of the model's parameters; a DistributedOptimizer has seen to it itself."""
    job = current.job_if_any()
    if job is None or job.cut.model is None or any(known.optimizer is optimizer for known in job.optimizers):
        return None
    own = set(map(id, job.cut.model.own_parameters()))
    given = [each for group in optimizer.param_groups for each in group["params"]]
    beside = [each for each in given if id(each) not in own]
    if len(beside) == len(given):
        return None
    if not job.pipelined:
        job.replicas.add(beside)  # averaged with the model's, as those of a DistributedOptimizer
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    closed = job.cut.before_update(closure)
    return None if closure is None else ((optimizer,), {**kwargs, "closure": closed})


def _parameter_of(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter of the model that a tensor of an optimizer's groups is, or stands for."""
    found = (optimizer.parameter_of(tensor) for optimizer in current.job().optimizers)
    return next((parameter for parameter in found if parameter is not tensor), tensor)
