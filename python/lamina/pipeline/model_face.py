# SPDX-License-Identifier: Apache-2.0
"""The cut of a model, step by step, as the engine asks for it: see [Note: life of a model] in
lamina/session/model_life.h."""

from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.job import current
from lamina.job.arguments import as_texts
from lamina.model import partitioned
from lamina.model.partitioned import PartitionedModel
from lamina.model.statistics import Statistics
from lamina.modules.tree import ModuleTree
from lamina.optim.averages import update as update_average
from lamina.pipeline.gradients import Gradients
from lamina.pipeline.routing import Routing
from lamina.script_state.counted import reads_counts
from lamina.torch_patches import averages, foreign
from lamina.tracing.proposal import Proposal, Tracer, propose


class ModelFace:
    """Lends Python's side to the cut of a model.

    Args:
        life: of the job's model, which it makes one of a model that is cut.
        module: the model.
        routing, gradients: its own, which begin with the cut.
        tracer: finds what the modules cost; None for no trace.
        proposal: of this rank, where it is made already, as in a change of the layout: values follow then.

    Attributes:
        model: who owns what, from when the ranks have agreed.
        values_follow: whether no rank has values before `load`.
    """

    def __init__(
        self,
        life: Any,
        module: nn.Module,
        routing: Routing,
        gradients: Gradients,
        tracer: Tracer | None,
        proposal: Proposal | None = None,
    ):
        self.model: PartitionedModel | None = None
        self.values_follow = proposal is not None
        self._proposal = proposal
        self._life, self._module, self._routing, self._gradients = life, module, routing, gradients
        self._tracer = tracer
        self._tree: ModuleTree | None = None

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """The arguments that are to be alike on all ranks."""
        return as_texts(self._life.arguments)

    def propose(self) -> tuple[_lamina.ModuleTree, _lamina.Plan | None, str, tuple]:
        """The tree, the plan, why there is none, and what the others are to know."""
        session, resumption = current.session(), self._life.resumption
        self._tree = ModuleTree(self._module)
        kept = {} if resumption is None else resumption.partition
        proposal = self._proposal or propose(self._tree, session, self._tracer, kept)
        return self._tree.filled(), proposal.plan, proposal.error, (proposal.report, proposal.writes)

    def take_cut(self, cut: _lamina.Cut, plan: str, word: tuple) -> None:
        """All ranks have agreed."""
        self.model = partitioned.as_agreed(self._tree, current.session(), cut, plan, word)

    @property
    def table(self) -> _lamina.ParameterTable:
        """The table of who holds what."""
        return self.model.table

    @property
    def portion_bytes(self) -> int:
        """How much of what others own world rank 0 may have to hold at a time."""
        return partitioned.PORTION_BYTES

    def make_values(self, tensors: list[torch.Tensor]) -> None:
        """Before the values of these are read."""
        partitioned.make_values(self.model, tensors)

    def take_values(self, sharding: _lamina.Sharding | None) -> None:
        """Values are here, or gone."""
        partitioned.take_values(self.model, sharding)

    def trim_optimizers(self) -> None:
        """Groups get this rank's part of the model, which is the job's from now on."""
        for optimizer in current.job().optimizers:
            optimizer.trim(self.model)
        self._life.model = self.model

    def watch(self) -> None:
        """Backwards are noticed, and torch's functions know of parts."""
        job, is_sharded = current.job(), self.model.sharding is not None
        self._gradients.begin(self.model)
        self._life.statistics = Statistics(self._module, self.model)
        self._life.reads_counts = job.session.config.deterministic_server and reads_counts(self._module)
        if not job.pipelined and (is_sharded or job.session.is_recorded):
            self._routing.see_calls(self.model)
        if job.pipelined:
            foreign.install(job.on_end)
        if job.pipelined or is_sharded:
            averages.install(update_average, job.on_end)

    def route(self) -> None:
        """Calls go to the owners. With one partition those of the first step do first, for which hooks may wait."""
        if current.job().pipelined:
            self._routing.begin(self.model)

    def load(self) -> None:
        """Loads what came before."""
        life = self._life
        waited, life.waiting = life.waiting, []
        for arguments in waited:
            life.state().load(*arguments)
        for optimizer in current.job().optimizers:
            optimizer.load_what_waits()
        if life.resumption is not None:
            resumption, life.resumption = life.resumption, None
            resumption.load()

    def settle(self) -> None:
        """Has a step take aside what is there now."""
        self._life.settle()
