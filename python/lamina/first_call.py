# SPDX-License-Identifier: Apache-2.0
"""The step in which a model is traced and cut: at its first call in the first body.

The body runs once, like all others: nothing of it is repeated for the trace. It waits at its first call of the model,
or of a module of it, while the thread that entered the step traces that call and cuts the model together with the other
ranks, and then goes on with a model whose calls are routed.
"""

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from lamina import _lamina, intercept
from lamina.errors import CancelledError
from lamina.tracing import Call


class FirstCall:
    """Stands between the bodies of a step and the thread that entered it.

    Args:
        session: of the job.
        root: the model, not cut yet. From now on its modules' calls come here.
        cut: traces and cuts the model: called once, in the thread that entered the step, with the call of the model;
            with None when the body called parts of it first, or ended without a call.
    """

    def __init__(self, session: _lamina.Session, root: nn.Module, cut: Callable[[Call | None], None]):
        self._session = session
        self._root = root
        self._cut = cut
        self._call: Call | None = None
        self._asked = threading.Event()
        self._answered = threading.Event()
        self._error: BaseException | None = None
        self._modules = list(root.modules())
        intercept.install({id(module): number for number, module in enumerate(self._modules)}, self._route)

    def around(self, body: Callable[[int], Any]) -> Callable[[int], Any]:
        """The body, which the model's cut waits for no longer than it runs."""

        def run(microbatch: int) -> Any:
            try:
                return body(microbatch)
            finally:
                if not self._asked.is_set():
                    self._ask(None)

        return run

    def serve(self, interrupted: bool) -> None:
        """Called again and again by the thread that entered the step."""
        if self._answered.is_set() or not (interrupted or self._asked.is_set()):
            return
        try:
            if interrupted:
                raise CancelledError("the step was interrupted before the model was cut")
            self._cut(self._call)
        except BaseException as error:
            self._error = error
            raise
        finally:
            intercept.forget(self._route)
            self._answered.set()

    def _route(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        module = self._modules[number]
        if not self._asked.is_set():
            self._ask(Call(args, kwargs) if module is self._root else None)
        return module(*args, **kwargs)

    def _ask(self, call: Call | None) -> None:
        self._call = call
        self._asked.set()
        self._session.lend_state(self._answered.wait)
        if self._error is not None:
            raise CancelledError("the model was not cut") from self._error
