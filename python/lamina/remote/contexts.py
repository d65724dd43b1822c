# SPDX-License-Identifier: Apache-2.0
"""Contexts: one iteration of one trainer over modules of other ranks. See [Note: contexts] in
lamina/parameter_server/protocol.h."""

from collections.abc import Sequence
from typing import Any

import torch

from lamina import _lamina
from lamina.errors import UsageError, refusal
from lamina.job import current


class Context:
    """One iteration: the calls in it, one backward or several, and then updates with its gradients, once.

    `with lamina.remote.context() as context:`. A thread is in one context at a time; different threads may be in
    different ones. When it ends, every rank forgets its graphs and gradients."""

    def __init__(self):
        self._session: _lamina.Session | None = None
        self._context: _lamina.RemoteContext | None = None

    def __enter__(self) -> "Context":
        if self._context is not None:
            raise UsageError(
                f"{self} was entered before: begin another one for each iteration", code="remote-context-ended"
            )
        session = current.outside_step("lamina.remote.context()").session
        self._context = session.parameter_server.begin_context()
        self._session = session
        return self

    def __exit__(self, *error: Any) -> None:
        self._session.parameter_server.end_context(self._context)

    def __repr__(self) -> str:
        if self._context is None:
            return "a context that was not entered"
        return f"context {self._context.number} of rank {self._context.origin}"

    def engine(self, what: str) -> tuple[_lamina.Session, _lamina.RemoteContext]:
        """Its session, and the engine's part of it; raises UsageError where `what` may not use it."""
        session = current.outside_step(what).session
        if self._context is None:
            raise UsageError(f"{what}: the context was not entered: with lamina.remote.context() as context")
        if self._session is not session:
            raise refusal("other-job", f"{what}: {self}")
        return session, self._context


def context() -> Context:
    """A new context, for one iteration: `with lamina.remote.context() as context:`."""
    return Context()


def backward(
    context: Context,
    tensors: torch.Tensor | Sequence[torch.Tensor],
    grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    retain_graph: bool = False,
) -> None:
    """The backward of tensors through calls of modules on whatever rank. The gradients of all leaves become the
    context's, each on the rank where the leaf is; `.grad` stays as it is.

    Args:
        context: the one in which the calls were made.
        tensors: losses; any other tensor needs its gradient in `grad_tensors`.
        grad_tensors: for each of `tensors` its gradient, of its shape, or None for a loss.
        retain_graph: another backward of the context goes through the same calls.

    Errors:
        UsageError: the context has ended, is another job's, or was used for an update.
        RemoteError: what a backward on another rank raised. PeerError: an owner is lost.
    """
    session, engine = require_context(context, "lamina.remote.backward()")
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors or [])
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"lamina.remote.backward() of a {type(tensor).__name__}: give tensors")
    if len(given) > len(tensors):
        raise UsageError(f"lamina.remote.backward(): {len(given)} gradients for {len(tensors)} tensors")
    session.remote_backward(engine, tensors, given, retain_graph)


def get_gradients(context: Context) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that a context has of leaves on this rank, which no update has taken yet.

    Errors:
        UsageError: the context has ended, or is another job's.
    """
    _, engine = require_context(context, "lamina.remote.get_gradients()")
    return dict(zip(*engine.gradients(), strict=True))


def require_context(context: Any, what: str) -> tuple[_lamina.Session, _lamina.RemoteContext]:
    """See `Context.engine`; raises UsageError for what is no context."""
    if not isinstance(context, Context):
        torchs = "; one of torch.distributed.autograd goes with RRefs" if isinstance(context, int) else ""
        raise UsageError(f"{what} takes a context of lamina.remote.context(), not {context!r}{torchs}")
    return context.engine(what)
