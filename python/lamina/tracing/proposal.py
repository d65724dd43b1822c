# SPDX-License-Identifier: Apache-2.0
"""How world rank 0 would cut a model: what it has traced, and the engine's plan of that."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lamina import _lamina
from lamina.errors import Error
from lamina.modules import placement
from lamina.modules.tree import ModuleTree
from lamina.tracing.state import Tie, Writes
from lamina.tracing.trace import Trace, described, summary
from lamina.util.told import tell

Tracer = Callable[[ModuleTree], Trace]

_TIES_SAID = 3


@dataclass
class Proposal:
    """Words of a rank when a model is cut; empty but on world rank 0.

    Attributes:
        plan: the engine's.
        error: why there is none; "" for no reason.
        report: of it, and of the trace.
        writes: the state that modules write; None where nobody has seen it.
    """

    plan: _lamina.Plan | None = None
    error: str = ""
    report: dict[str, Any] = field(default_factory=dict)
    writes: Writes | None = None


def propose(
    tree: ModuleTree,
    session: _lamina.Session,
    tracer: Tracer | None,
    kept: dict[str, int] | None = None,
    config: _lamina.Config | None = None,
) -> Proposal:
    """Traces and plans, on world rank 0. What the plan raises is its error: every rank's.

    Args:
        tracer: finds out what the modules cost; None for no trace.
        kept: the partition of each module, as it was before.
        config: of another layout than the session's; None for that one.
    """
    if session.rank != 0:
        return Proposal()
    try:
        found = tracer(tree) if tracer is not None else Trace()
        if found.fails and isinstance(found.error, Error):
            raise found.error
        if found.fails:
            return Proposal(
                error=f"the model failed on rank 0, where its first call was traced: {described(found.error)}"
            )
        for note in found.notes + placement.ignored(tree.modules) + _said(tree, found.ties):
            tell(note)
        plan = session.plan(tree.filled(), found.measures, kept or {}, config)
    except Exception as raised:
        return Proposal(error=str(raised) or type(raised).__name__)
    return Proposal(plan, "", plan.report | summary(tree, found), found.writes)


def _said(tree: ModuleTree, ties: list[Tie]) -> list[str]:
    """Lines for whoever wonders why modules are together."""
    lines = [
        f"{' and '.join(tree.names[node] or 'the model' for node in sorted(tie.nodes))} share {tie.attribute}: they "
        "are on one rank"
        for tie in ties
    ]
    more = f"{len(lines) - _TIES_SAID} more attributes tie modules: see partition_report()"
    return lines if len(lines) <= _TIES_SAID else [*lines[:_TIES_SAID], more]
