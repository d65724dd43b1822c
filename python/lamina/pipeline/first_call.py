# SPDX-License-Identifier: Apache-2.0
"""The step in which a model is traced and cut, or compared with the plain one: at its first call in the first body.

The body runs once, like all others: nothing of it is repeated for the trace. It waits at its first call of the model,
or of a module of it. Meanwhile the thread that entered the step traces that call, and cuts the model together with the
other ranks. Then the body goes on with a model that has its calls routed. The engine says who waits for what.
"""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn

from lamina import _lamina
from lamina.errors import ConfigError, said
from lamina.job import current
from lamina.modules.tree import ModuleTree
from lamina.pipeline.before_cut import BeforeCut
from lamina.script_state.generators import Streams, of_torch
from lamina.torch_patches import module_call
from lamina.tracing.proposal import Tracer
from lamina.tracing.sandbox import Call
from lamina.tracing.trace import Trace, TraceOptions, trace

Called = tuple[Call, Streams]


class FirstCall:
    """Has the model cut at the first call of one of its modules; until `end`.

    Args:
        session: of the job.
        root: the model, not cut yet. From now on its modules' calls come here.
        options: how it is traced; None: it is not.
        cut: cuts the model: called once, in the thread that entered the step, with what traces it, and the call with
            its random numbers. Where the body calls a part of it first, or ends without a call, the first finds
            nothing, and there is no call.
        before: the model as the step began.
    """

    def __init__(
        self,
        session: _lamina.Session,
        root: nn.Module,
        options: TraceOptions | None,
        cut: Callable[[Tracer, Called | None], None],
        before: BeforeCut | None,
    ):
        self._session = session
        self._root = root
        self._options = options
        self._cut = cut
        self._before = before
        self._pipelined = current.job().pipelined
        self._is_cut = False
        self._error: Exception | None = None  # of the model itself, which its trace has met
        self._raised_in: TracebackType | None = None
        self._called: Called | None = None  # the call that it was cut at
        self._modules = list(root.modules())
        module_call.install({id(module): number for number, module in enumerate(self._modules)}, self._route)

    def cut_uncalled(self) -> None:
        """Cuts a model that no body has called; nothing where one has."""
        if not self._is_cut:
            self._make(self._nothing("the first step made no call of the model"), None)

    def end(self) -> None:
        """Calls do not come here any more."""
        module_call.forget(self._route)

    def _route(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._raise_error()
        module = self._modules[number]
        if module is self._root:
            called = Call(args, kwargs), Streams(of_torch())
            make = functools.partial(self._make, functools.partial(self._trace, called[0]), called)
        else:
            part = self._nothing("the first step called a part of the model before the model")
            called, make = None, functools.partial(self._make, part, None)
        if self._pipelined:
            self._session.cut_here(make)
        else:
            make()
        self._raise_error()
        if self._before is not None:
            self._before.keep_as_own()
        output = module(*args, **kwargs)
        if called is self._called:
            current.job().step_check.see_outputs(output)
        return output

    def _raise_error(self) -> None:
        """In a body, of which there are several."""
        if self._error is not None:
            raise self._error.with_traceback(self._raised_in)

    def _trace(self, call: Call, tree: ModuleTree) -> Trace:
        found = Trace() if self._options is None else trace(tree, call, self._options)
        if found.fails:
            self._error, self._raised_in = found.error, found.error.__traceback__
        return found

    def _make(self, tracer: Tracer, called: Called | None) -> None:
        """Cuts the model. Where that ends with an error of the model itself, the bodies raise it, at their calls."""
        self._is_cut, self._called = True, called
        try:
            self._cut(tracer, called)
        except ConfigError:
            if self._error is None:
                raise
        finally:
            if self._error is None:
                self.end()

    def _nothing(self, why: str) -> Tracer:
        notes = [] if self._options is None else [f"{why}: {said('untraced')}"]
        return lambda _: Trace(notes=notes)
