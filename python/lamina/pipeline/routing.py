# SPDX-License-Identifier: Apache-2.0
"""The way of calls of a model's modules: to the ranks that own them, and past hooks of the engine."""

import functools
import itertools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from lamina import _lamina
from lamina.calls.remote_call import RemoteCalls
from lamina.errors import refusal
from lamina.job import current, parts
from lamina.libraries import hugging_face
from lamina.model.partitioned import PartitionedModel
from lamina.modules import rng_streams, runs
from lamina.modules.slots import Slots
from lamina.pipeline import updates
from lamina.shared_state.watch import Watch
from lamina.tensor_parallel import recorded, turns
from lamina.torch_patches import compiled, module_call, sequential
from lamina.util import pytree


class Routing(parts.Routing):
    """The calls of a job's model, which go to the owners of its modules from its first step on.

    Args:
        module: says which model is wrapped.

    Attributes:
        is_on: whether they do, or will again once the model is not called plainly any more.
        shared_state: watches the state of the script around the model.
        calls: those of its modules between ranks, while they go to the owners of several partitions.
    """

    def __init__(self, module: Callable[[], nn.Module]):
        self.is_on = False
        self.shared_state = Watch()
        self.calls: RemoteCalls | None = None
        self._module = module
        self._model: PartitionedModel | None = None
        self._session = current.session()
        self._pipelined = current.job().pipelined
        self._slots: Slots | None = None  # where its parameters and buffers are; None before the first step
        self._waited: list[str] = []  # names of modules that are waited for
        self._interception: tuple | None = None  # of calls of modules: what `module_call.install` takes
        self._compiler_is_seen = False
        self._ends = ExitStack()
        current.job().on_end.callback(self.leave)

    def watch_tensors(self) -> None:
        """Before a step: notes which tensors are the model's in it, for others may have taken their places since the
        last one."""
        if not self._pipelined:
            return
        if self._slots is None:
            self._slots = Slots(self._module())
        if self._slots.watch(current.session()) and self.calls is not None:
            self.calls.forget_parts()

    def see_calls(self, model: PartitionedModel) -> None:
        """Has the engine see calls of a model of one partition, before its first step."""
        self._model = model
        module_call.install({}, self.call_remote, hooked=self._hooked())

    def see_compiler(self, model: PartitionedModel) -> None:
        """Before a step: has compiled code see values where there are references, once torch's compiler is imported."""
        if not self._compiler_is_seen:
            is_sharded = model.sharding is not None
            self._compiler_is_seen = compiled.install(current.job().on_end, self._pipelined, is_sharded)

    def begin(self, model: PartitionedModel) -> None:
        """Has calls of modules go to their owners."""
        self._model = model
        session, modules = current.session(), model.tree.modules
        filled = model.tree.filled()
        own_stream = rng_streams.agree([id(each) in filled.starting_stream for each in modules], session)
        if self._pipelined:
            late = updates.late(model)
            waited = [id(each) in filled.waited_for or id(each) in late for each in modules]
            model.runs = runs.find(model.tree, model.owners, list(model.anywhere.values()), own_stream, waited)
            called_at_once = [(run.name, run.owner, run.streams) for run in model.runs]
            session.set_model(model.cut, model.tree.names, own_stream, waited, called_at_once)
            self._waited = list(itertools.compress(model.tree.names, waited))
        streamed = list(itertools.compress(modules, own_stream))
        whole = updates.whole(model) if self._pipelined else []
        self._interception = (model.remote(), self.call_remote, streamed, model.anywhere, self._hooked(), whole)
        self.is_on = True
        self.resume()

    def resume(self) -> None:
        """Ends what `leave` began; nothing before calls go to the owners."""
        if not self.is_on:
            return
        session, model = current.session(), self._model
        self._install_calls()
        if self._pipelined:
            sequential.install(runs.calls(model.runs, model.partition, compiled.outside(self.call_remote)), self._ends)
            self._ends.callback(self.shared_state.remove)
            self.shared_state.install(
                self._module(),
                current.job().model,
                list(zip(model.tree.names, model.tree.modules, model.owners, strict=True)),
                model.partition,
                model.elsewhere,
                waited=self._waited,
                homes=model.homes,
                in_turns=functools.partial(in_turns, session),
            )
            self.calls = RemoteCalls(model, self._slots, self.shared_state)
        self.name_turns(_lamina.records_events(session))

    def leave(self) -> None:
        """Calls, attributes and names are the plain model's until `resume`."""
        module_call.remove()
        self._ends.close()
        self.shared_state, self.calls = Watch(), None

    def forget_hooks(self) -> None:
        """Some hooks of calls are no more."""
        if self._interception is not None:
            remote, route, streamed, anywhere, _, whole = self._interception
            self._interception = remote, route, streamed, anywhere, self._hooked(), whole
            self._install_calls()
            self.name_turns(_lamina.records_events(current.session()))

    def name_turns(self, recorded: bool = True) -> None:
        """As `parts.Routing.name_turns`."""
        if self.is_on and self._pipelined:
            module_call.name_turns(self._model.whole_parts() if recorded else {})

    def call_remote(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls a module that another rank owns.

        Errors:
            UsageError: outside of steps; see `RemoteCalls.call`.
        """
        if not _lamina.in_step():
            owner = self._session.translate("partitions", self._model.callee_owner(number))
            raise refusal("called-elsewhere", self._model.callee_name(number), owner)
        output = self.calls.call(self._session, number, args, kwargs)
        if hugging_face.CAPTURING in sys.modules:
            hugging_face.collect(self._model.callee(number), args, output)
        return output

    def _install_calls(self) -> None:
        remote, _, *others = self._interception
        if remote or any(others):
            module_call.install(*self._interception, hooks_see_streams=current.session().hooks_want_tensors)

    def _hooked(self) -> dict[int, module_call.Begin]:
        """Functions that begin a call of each module that has hooks, by id(module)."""
        job = current.job()
        session, recording, check, tree = job.session, job.recording, job.step_check, self._model.tree

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


def in_turns(session: _lamina.Session) -> bool:
    """True where several microbatches may be under way."""
    return session.config.active_microbatches != 1 and session.microbatches > 1
