# SPDX-License-Identifier: Apache-2.0
"""Costs and habits of a model, module by module, found out before it is cut.

[Note: trace] The first call of the model in a step body is traced, with its own arguments, on world rank 0. First with
fake tensors: nothing is computed, no memory is needed, and what operations cost is counted for a nominal device. Where
the model reads data, or cannot be run so for another reason, one microbatch is computed. Where that is impossible too,
the model is cut by the bytes of its parameters, unless an error of its own is why: see [Note: own error]. A trace
leaves nothing behind: all that the model and its arguments can reach (`script_state/walk.py`) and random numbers are as
before, and hooks of the script are not called. A fake tensor that still is somewhere afterwards is looked for
(`leftovers.py`).
"""

import functools
import itertools
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lamina import _lamina
from lamina.errors import Error, UsageError, said
from lamina.job.ranks import device
from lamina.modules.tree import ModuleTree
from lamina.tensor_parallel import layers
from lamina.tracing import leftovers
from lamina.tracing.costs import nominal
from lamina.tracing.record import Measures, Recorder, RunsBackwardError, WritesParameterError, calls_all_hooks
from lamina.tracing.sandbox import Call, copied, moved, put_stand_ins, undisturbed
from lamina.tracing.state import StateWatch, Tie, Writes
from lamina.tracing.times import measure_times
from lamina.util.settings import setting
from lamina.util.told import tell


@dataclass(frozen=True)
class TraceOptions:
    """The options that `DistributedModel` was given.

    Attributes:
        device: where a model is run whose times or memory are measured; None: where its parameters are.
        times: whether times are measured, instead of counted.
        memory: whether memory is measured while the model runs, instead of with fake tensors.
    """

    device: torch.device | None = None
    times: bool = False
    memory: bool = False


@dataclass
class Trace:
    """The findings.

    Attributes:
        measures: per node of the tree; None where nothing could be found out.
        ties: the attributes that modules share.
        writes: the state that modules write.
        notes: one line for each thing that was asked for and could not be done.
        error: the last that the model raised in a trace.
        fails: whether any call raises it: an error of the model's own, or of slices that do not fit.
    """

    measures: list[Measures] | None = None
    ties: list[Tie] = field(default_factory=list)
    writes: Writes | None = None
    notes: list[str] = field(default_factory=list)
    error: Exception | None = None
    fails: bool = False


_running = False


def is_tracing() -> bool:
    """True while this process is tracing a model."""
    return _running


def trace(tree: ModuleTree, call: Call, options: TraceOptions) -> Trace:
    """Traces one call of the model, see [Note: trace].

    Args:
        tree: of the model.
        call: the model's first.
        options: what to measure.
    """
    found = Trace()
    with _tracing():
        if not options.memory:
            found.measures = _run_fake(tree, call, found)
        if found.measures is None and not _is_fake(tree):
            found.measures = _run(tree, call, options, found)
            found.fails = found.measures is None and _fails_again(tree, call, options, found.error)
        elif found.measures is None:
            found.fails = _misfits(found.error)
        if found.measures is None:
            found.notes.append(said("untraced"))
        elif options.times:
            try:
                measure_times(tree, call, options.device, found.measures)
            except Exception as error:
                found.notes.append(f"times could not be measured ({described(error)}): operations were counted instead")
        else:
            found.notes.clear()
    return found


def options_of(trace_device: str, times: bool, memory: bool) -> TraceOptions:
    """Returns what the arguments of `DistributedModel` ask for.

    Errors:
        UsageError: no such device; times of a host that has another device to run the model.
    """
    if trace_device not in ("cpu", "gpu"):
        raise UsageError(f'trace_device is "cpu" or "gpu", not {trace_device!r}')
    own = device()
    has_device = own.type != "cpu"
    if trace_device == "cpu" and times and has_device:
        raise UsageError(
            'trace_execution_times=True with trace_device="cpu": times of the host say nothing about the device that '
            'trains; leave trace_device at "gpu", or trace_execution_times out'
        )
    if trace_device == "cpu":
        return TraceOptions(torch.device("cpu"), times, memory)
    return TraceOptions(own if has_device else None, times, memory)


def summary(tree: ModuleTree, found: Trace) -> dict[str, Any]:
    """The line of a report on a trace."""
    named = list(zip(tree.names, found.measures or [], strict=False))
    return {
        "reads_data": [name for name, each in named if each.reads_data],
        "draws": [name for name, each in named if each.draws],
        "slices": [name for name, module in zip(tree.names, tree.modules, strict=True) if layers.is_sliced(module)],
        "exchange_us": {name: sum(each.exchange_us) for name, each in named if any(each.exchange_us)},
        "ties": {tie.attribute: [tree.names[node] for node in sorted(tie.nodes)] for tie in found.ties},
        "notes": found.notes,
    }


@contextmanager
def _tracing():
    global _running
    _running = True
    # Modules that are compiled run as they were written.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with eager, _lamina.Alone():
            yield
    finally:
        _running = False


def _run_fake(tree: ModuleTree, call: Call, found: Trace) -> list[Measures] | None:
    """The measures of a microbatch of fake tensors, of which none is left."""
    mode = _fake_mode(tree)
    measures = _attempt(tree, call, None, True, found, mode)
    _let_go(found.error)
    if _is_fake(tree):
        return measures
    found.error = None  # which may hold such a tensor, too
    for line in leftovers.clear(mode):
        tell(line)
    return measures


def _run(tree: ModuleTree, call: Call, options: TraceOptions, found: Trace) -> list[Measures] | None:
    """The measures of one microbatch that is computed; of its activations only what the model itself needs is kept."""
    try:
        return _attempt(tree, call, options, False, found)
    except RunsBackwardError:
        return _attempt(tree, call, options, True, found)


def _fails_again(tree: ModuleTree, call: Call, options: TraceOptions, error: Exception) -> bool:
    """[Note: own error] A computed microbatch has failed. It runs once more, without the one thing of a trace that is
    in the way of a model: hooks on what is saved. When that raises the same, so would the step, and the script gets the
    error at its call. A model with hooks of the script, which a trace calls none of, may need them. Neither errors of
    ours nor a lack of memory are the model's: a rank alone has less of both than the step. But for slices that do not
    fit the code around them: see [Note: proofs]."""
    if _misfits(error):
        return True
    not_its_own = (Error, WritesParameterError, MemoryError, torch.OutOfMemoryError)
    if isinstance(error, not_its_own) or "allocate memory" in str(error) or not calls_all_hooks(tree.root):
        return False
    again = Trace()
    with suppress(RunsBackwardError):
        _attempt(tree, call, options, True, again, saved=False)
    return (type(again.error), str(again.error)) == (type(error), str(error))


def _misfits(error: Exception | None) -> bool:
    return isinstance(error, Error) and error.code == "tp-unproven"


def _attempt(
    tree: ModuleTree,
    call: Call,
    real: TraceOptions | None,
    keep: bool,
    found: Trace,
    fake: FakeTensorMode | None = None,
    saved: bool = True,
) -> list[Measures] | None:
    """The measures of one forward: `fake`, or a `real` one; those of what is `saved`, too. Else what was `found` is why
    there are none."""
    recorder = None
    try:
        with ExitStack() as stack:
            reach = stack.enter_context(undisturbed(tree.root, call))
            make = moved(real.device) if real else None
            if fake is not None:
                make = _faked(fake)
                stack.enter_context(fake)
                stack.enter_context(_quiet())
            put_stand_ins(tree.root, make)
            args, kwargs = copied((call.args, call.kwargs), make)
            kept = reach.tensors if real else ()
            watch = StateWatch(tree)
            recorder = Recorder(
                tree, nominal(_device(tree, real)), watch, protect=bool(real), keep=keep, tell=tell, written=kept
            )
            stack.enter_context(call.surroundings())
            stack.enter_context(recorder.watching(saved))
            with watch.watching():
                call.of(tree.root, args, kwargs)
            found.ties, found.writes = watch.ties(), watch.writes()
        for tie in found.ties:
            for node in tie.nodes:
                recorder.measures[node].ties |= tie.nodes - {node}
        return recorder.measures
    except RunsBackwardError:
        raise
    except Exception as error:
        found.notes.append(_why(tree, recorder, error, real))
        found.error = error
        return None


def _why(tree: ModuleTree, recorder: Recorder | None, error: Exception, real: TraceOptions | None) -> str:
    how = "one microbatch could not be run to trace it" if real else "it could not be traced without running it"
    where = "" if recorder is None or recorder.failed_in is None else tree.names[recorder.failed_in] or "the model"
    return f"{how} ({where}: {described(error)})" if where else f"{how} ({described(error)})"


def _let_go(error: BaseException | None) -> None:
    """Has an error, and those behind it, keep no tensors of the functions that it went through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def described(error: Exception) -> str:
    """The type of an error, and the first line that it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _device(tree: ModuleTree, real: TraceOptions | None) -> torch.device:
    if real is not None and real.device is not None:
        return real.device
    if device().type != "cpu":
        return device()
    first = next(_tensors(tree), None)
    return torch.device("cpu") if first is None else first.device


def _tensors(tree: ModuleTree) -> Iterator[torch.Tensor]:
    return itertools.chain(tree.root.parameters(), tree.root.buffers())


def _quiet() -> AbstractContextManager[None]:
    """Limits of fake tensors are no error of the job: torch does not write its traceback."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    return setting(True, lambda: logger.disabled, functools.partial(setattr, logger, "disabled"))


def _is_fake(tree: ModuleTree) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in _tensors(tree))


def _fake_mode(tree: ModuleTree) -> FakeTensorMode:
    """The tape of a model that was built without memory, else a new one."""
    modes = (tensor.fake_mode for tensor in _tensors(tree) if isinstance(tensor, FakeTensor))
    return next(modes, None) or FakeTensorMode(allow_non_fake_inputs=True)


def _faked(mode: FakeTensorMode) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes fake stand-ins, where the rank computes: the model may not be there yet."""
    on_device = moved(device()) if device().type != "cpu" else lambda tensor: tensor
    return lambda tensor: on_device(tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor))
