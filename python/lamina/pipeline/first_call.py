# SPDX-License-Identifier: Apache-2.0
"""The step in which a model is traced and cut: at its first call in the first body.

The body runs once, like all others: nothing of it is repeated for the trace. It waits at its first call of the model,
or of a module of it, while the thread that entered the step traces that call and cuts the model together with the other
ranks, and then goes on with a model whose calls are routed.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from lamina import _lamina
from lamina.errors import CancelledError, TimeoutError, UsageError
from lamina.torch_patches import module_call
from lamina.tracing.proposal import Tracer
from lamina.tracing.sandbox import Call
from lamina.tracing.trace import Trace, TraceOptions, trace


class FirstCall:
    """Stands between the bodies of a step and the thread that entered it.

    Args:
        session: of the job.
        root: the model, not cut yet. From now on its modules' calls come here.
        options: how it is traced.
        cut: cuts the model: called once, in the thread that entered the step, with what traces it. Where the body calls
            a part of it first, or ends without a call, that finds nothing.
    """

    def __init__(self, session: _lamina.Session, root: nn.Module, options: TraceOptions, cut: Callable[[Tracer], None]):
        self._session = session
        self._root = root
        self._options = options
        self._cut = cut
        self._tracer: Tracer | None = None
        self._asked = threading.Event()
        self._answered = threading.Event()
        self._error: BaseException | None = None
        self._modules = list(root.modules())
        module_call.install({id(module): number for number, module in enumerate(self._modules)}, self._route)

    def around(self, body: Callable[[int], Any]) -> Callable[[int], Any]:
        """The body, which the model's cut waits for no longer than it runs."""

        def run(microbatch: int) -> Any:
            try:
                return body(microbatch)
            finally:
                if not self._asked.is_set():
                    self._ask(_nothing("the first step made no call of the model"))

        return run

    def serve(self, interrupted: bool) -> None:
        """Called again and again by the thread that entered the step, after an error too: the body hears of that when
        the step has it, so that it is the step's."""
        if self._error is not None:
            self._answered.set()
        elif interrupted:
            self._end(CancelledError("the step was interrupted before the model was cut"))
        elif self._asked.is_set() and not self._answered.is_set():
            try:
                self._cut(self._tracer)
            except BaseException as error:
                self._end(error)
                raise
            self._end(None)
            self._answered.set()

    def _end(self, error: BaseException | None) -> None:
        module_call.forget(self._route)
        self._error = error

    def _route(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        module = self._modules[number]
        if not self._asked.is_set():
            if not _lamina.in_step():
                raise UsageError(
                    "the model was called in a thread of its own in its first step: call it in the thread that runs "
                    "the step's body"
                )
            whole = functools.partial(trace, call=Call(args, kwargs), options=self._options)
            part = _nothing("the first step called a part of the model before the model")
            self._ask(whole if module is self._root else part)
        return module(*args, **kwargs)

    def _wait(self) -> None:
        timeout_s = self._session.config.timeout_s
        if not self._answered.wait(timeout_s):
            raise TimeoutError(
                f"the cut of the model, which its first call waits for: no answer for {timeout_s:.0f} s; raise "
                "timeout_s if it needs longer"
            )

    def _ask(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._asked.set()
        self._session.lend_state(self._wait)
        if self._error is not None:
            raise CancelledError("the model was not cut") from self._error


def _nothing(why: str) -> Tracer:
    return lambda _: Trace(notes=[f"{why}: it is cut by the bytes of its parameters"])
