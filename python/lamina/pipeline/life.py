# SPDX-License-Identifier: Apache-2.0
"""The life of a job's model: whole at first, cut in the first step, brought together again for a while."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from lamina.errors import ConfigError, DesyncError, UsageError, refusal
from lamina.job import current, parts
from lamina.model.partitioned import PartitionedModel, bring_together, let_go
from lamina.model.statistics import Statistics
from lamina.modules.tree import ModuleTree
from lamina.pipeline.before_cut import BeforeCut
from lamina.pipeline.compiled_parts import require_no_graphs
from lamina.pipeline.first_call import Called, FirstCall
from lamina.pipeline.gradients import Gradients
from lamina.pipeline.model_face import ModelFace
from lamina.pipeline.routing import Routing, in_turns
from lamina.saved_state.state_dicts import ModelState
from lamina.tensor_parallel import unslicing
from lamina.torch_patches import module_call
from lamina.tracing.proposal import Proposal, Tracer
from lamina.tracing.trace import Trace, TraceOptions


class Life(parts.Life):
    """The life of a job's model: whole at first, then cut, then one whose calls go to the owners of its modules.

    Args:
        module: says which model is wrapped.
        trace_options: how it is traced.
        arguments: of the DistributedModel, which are to be the same on all ranks.
        routing: of its calls.
        gradients: its own.

    Attributes:
        waiting: partial states that came before the cut: what `ModelState.load` takes.
        arguments: see above.
        when_routed: called once, when its calls go to the owners.
        statistics: of the model's BatchNorms; None before it is cut.
        reads_counts: whether its forwards compute with what they count, where runs are to give the same bits.
        pipelined: whether its calls are to go to several ranks.
        trace: what world rank 0 has found out of the modules; None on other ranks, and before.
    """

    def __init__(
        self,
        module: Callable[[], nn.Module],
        trace_options: TraceOptions,
        arguments: Mapping[str, Any],
        routing: Routing,
        gradients: Gradients,
    ):
        self.model: PartitionedModel | None = None
        self.waiting: list[tuple[Mapping[str, Any], bool, bool]] = []
        self.arguments = arguments
        self.when_routed: Callable[[], None] = lambda: None
        self.statistics: Statistics | None = None
        self.reads_counts = False
        self.pipelined = current.job().pipelined
        self.trace: Trace | None = None
        self._module, self._routing, self._gradients = module, routing, gradients
        self._trace_options = trace_options
        self._announced = False  # that it is cut
        self._before: BeforeCut | None = None
        self._recut: Callable[[], None] | None = None  # cuts layers again that are whole for a while

    @property
    def whole_everywhere(self) -> bool:
        """As `parts.Life.whole_everywhere`: until it is cut, and after that where it is in one piece."""
        return self.model is None or self.model.whole_everywhere

    def share_written(self) -> None:
        """Gives all ranks what a program wrote to parts of parameters, which stand in optimizers, before the model is
        used."""
        for optimizer in current.job().optimizers:
            optimizer.parameters.share_written()

    def job_if_any(self) -> current.Job | None:
        """The model's job; None when that has ended."""
        job = current.job_if_any()
        return job if job is not None and job.life is self else None

    def require_job(self, what: str) -> None:
        """UsageError where the model's job has ended."""
        if self.job_if_any() is None:
            raise refusal("job-ended", what, "DistributedModel")

    def job(self, what: str) -> current.Job:
        """The model's job, outside of steps, for what it is to do with the model."""
        job = current.outside_step(what)
        self.require_job(what)
        self.share_written()
        return job

    def enter_step(self) -> FirstCall | None:
        """Cuts the model and routes its calls, the first time; collective over the world. A model that is to be traced
        or compared is cut at its first call: the ranks that lead get what lets their step do so, the others wait for
        them here. One that is compared in a later step is called plainly where it would be cut."""
        job = current.job()
        job.step_check.look_for_room(self._module())
        check = job.step_check
        self.share_written()
        self._routing.watch_tensors()
        if self.pipelined:
            require_no_graphs(self._module())
        config = job.session.config
        options = self._trace_options if config.auto_partition and not config.skip_tracing else None
        if not self.pipelined:
            self._make_and_route(None)
            return self._compare_at_first_call(check) if check.is_due else None
        waits = check.is_due or (self.model is None and options is not None)
        self._before = BeforeCut(self._module()) if waits else None
        if check.is_due and self.model is not None:
            self._unroute()
        if waits and job.leads:
            return FirstCall(job.session, self._module(), options, self._make_and_route, self._before)
        try:
            self._make_and_route(None)
        except (ConfigError, UsageError) as error:
            if waits and not isinstance(error, DesyncError):
                # The leading rank is in it, and ends it with this error.
                job.session.run_step(job.microbatches, None, lambda outputs, _: outputs)
            raise
        return None

    def make(self, tracer: Tracer | None = None, proposal: Proposal | None = None) -> None:
        """Cuts the model, the first time, with what the tracer finds, or as a change of the layout has proposed it;
        collective over the world."""

        def keeping(tree: ModuleTree) -> Trace:
            self.trace = tracer(tree)
            return self.trace

        if self.model is None:
            kept = None if tracer is None else keeping
            if proposal is not None:  # no step has begun
                self._routing.watch_tensors()
            face = ModelFace(self, self._module(), self._routing, self._gradients, kept, proposal)
            current.session().begin_life(face)
            current.job().recording.note_cut()

    def go_on_from(self, before: "Life") -> None:
        """The model's life in another layout has ended: goes on with what does not depend on it."""
        self.trace, self.waiting = before.trace, before.waiting

    def take_back(self) -> None:
        """Gives every rank the whole model, on the CPU, to be called like the plain one, until `make_again`; collective
        over the ranks that have one copy of the model."""
        if current.job().sliced and self._recut is None:
            self._recut = unslicing.make_whole(self.model.tree.root, self.model.session)
            self.model.forget_table()
        if self.pipelined:
            bring_together(self.model)
        self._unroute()

    @contextmanager
    def unrouted(self) -> Iterator[None]:
        """As `parts.Life.unrouted`."""
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
        self._routing.resume()

    def slice_again(self) -> None:
        """Ends it where it has made layers whole; routes that are left for another reason stay so."""
        if self._recut is not None:
            self.make_again()

    def state(self) -> ModelState:
        """The state of the model, which is cut."""
        return ModelState(self.model)

    def settle(self) -> None:
        """Snapshots gradients and BatchNorm statistics at the start of a step, so that the step reproduces the plain
        loop."""
        if not self.pipelined:
            return
        session = current.session()
        if session.config.deterministic_server:
            own = [parameter for name, parameter in self._module().named_parameters() if self.model.owns(name)]
            session.set_order(own, self.reads_counts or not self.statistics.are_all_buffers())
        session.set_statistics(self.statistics.rows())

    def _unroute(self) -> None:
        """Calls are the plain model's until `make_again`."""
        self._routing.leave()
        self.whole = True

    def _compare_at_first_call(self, check: parts.StepCheck) -> FirstCall:
        """Has a model of one partition called plainly, too, where a body calls it first."""

        def compare(_: Tracer, called: Called | None) -> None:
            if check.leads:
                check.run_plainly(self._module(), called)
            self.make_again()

        check.take_values(self._module(), self.model)
        check.begin_step(self.model)
        self._unroute()
        return FirstCall(current.session(), self._module(), None, compare, None)

    def _make_and_route(self, tracer: Tracer | None, called: Called | None = None) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.bring(current.session())
        check = current.job().step_check if self.pipelined else parts.StepCheck()
        check.take_values(self._module(), self.model)
        if check.leads:
            check.run_plainly(self._module(), called)
        self.make(tracer)
        check.begin_step(self.model)
        self.make_again()
        self._routing.see_compiler(self.model)
        if not self._routing.is_on:  # one partition, whose first step this is
            self._routing.begin(self.model)
        if not self._announced:
            self._announced = True
            self.when_routed()
        self.settle()
        module_call.tell_compiler()
        if before is not None:
            before.finish(self.model.elsewhere, in_turns(current.session()))
