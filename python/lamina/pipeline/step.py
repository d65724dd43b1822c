# SPDX-License-Identifier: Apache-2.0
"""Step functions: the part of a training loop that runs once per microbatch."""

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch

from lamina import _lamina
from lamina.errors import UsageError
from lamina.exits import excepthook
from lamina.exits.device_errors import explained
from lamina.job import current, seeds
from lamina.pipeline import other_random
from lamina.pipeline.around import Around
from lamina.pipeline.batches import Batches
from lamina.pipeline.first_call import FirstCall
from lamina.pipeline.output import Item, StepOutput, merge
from lamina.shared_state.watch import Watch
from lamina.util import call_sites, pytree
from lamina.util.checks import require_booleans

Parameters = ParamSpec("Parameters")
Rest = ParamSpec("Rest")
Result = TypeVar("Result")
Second = TypeVar("Second", bound=torch.Tensor)
Key = TypeVar("Key")


@overload
def step(function: Callable[Parameters, Result], /) -> "StepFunction[Parameters, Result]": ...


@overload
def step(
    *,
    non_split_inputs: Iterable[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> "Callable[[Callable[Parameters, Result]], StepFunction[Parameters, Result]]": ...


def step(
    function: Callable | None = None,
    /,
    *,
    non_split_inputs: Iterable[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable:
    """Makes a function a step function: `@lamina.step`, or `@lamina.step(...)`; methods too.

    Calling it splits the tensors among its arguments into microbatches (`Splitter` says how; the first call says
    what it found) and runs the function once for each, on the rank of partition 0. What is split, and lies on the host,
    is copied to the rank's device before. The other ranks of the pipeline call it as well, and run what they own of the
    model; of their call only the function's name is looked at. All of them get the result: a StepOutput in the place of
    each tensor that the function returns, a list of one value per microbatch in the place of anything else (see
    `output.merge`).

    Args:
        function: the function. It may call the model and `model.backward`.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: the axis along which the tensors of an argument are split, by the argument's name; else 0.
        detach_outputs: whether the tensors returned are detached from their graph.

    Errors:
        DesyncError: on every rank of the pipeline, where one has entered another step function, or waits in another
            call of ours for the others.
        UsageError: at decoration, names that are no arguments of the function, and options of another type. At a call,
            tensors that cannot be split side by side, a step inside a step, or no `init`. What the function, or a
            module on any rank, raises is raised on every rank of the pipeline; with `ddp`, of the other replicas too,
            where they average their gradients.
    """

    def decorate(function: Callable) -> StepFunction:
        return StepFunction(function, non_split_inputs, input_split_axes or {}, detach_outputs)

    return decorate if function is None else decorate(function)


class StepFunction(Generic[Parameters, Result]):
    """A function decorated with `step`.

    Attributes:
        is_of_training: whether it counts as a step of the script, to recordings and to hooks after steps.
    """

    is_of_training = True

    def __init__(
        self, function: Callable, non_split_inputs: Iterable[str], axes: Mapping[str, int], detach_outputs: bool
    ):
        if not callable(function):
            raise UsageError(f"step() decorates a function, not {type(function).__name__}; its options are keywords")
        if isinstance(non_split_inputs, str):
            raise UsageError(f"non_split_inputs is a list of names: [{non_split_inputs!r}]")
        if not isinstance(axes, Mapping) or not all(type(axis) is int for axis in axes.values()):
            raise UsageError(f"input_split_axes is a dictionary of names and axes, such as {{'x': 1}}, not {axes!r}")
        require_booleans(detach_outputs=detach_outputs)
        functools.update_wrapper(self, function)
        self._function = function
        self._label = _label(function)
        # By which ranks compare what they have entered.
        self.name = f"{getattr(function, '__module__', '?')}.{self._label}"
        self._signature = inspect.signature(function)
        self._whole = frozenset(non_split_inputs)
        self._axes = dict(axes)
        self._detach_outputs = detach_outputs
        self._around = Around(function)
        self._check_names()
        self._batches = Batches(self._label, self._whole, self._axes)

    # Results of typed functions, as `output.merge` makes them.

    @overload
    def __call__(
        self: "StepFunction[Parameters, Item]", *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> StepOutput[Item]: ...

    @overload
    def __call__(
        self: "StepFunction[Parameters, tuple[Item, Second]]", *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> tuple[StepOutput[Item], StepOutput[Second]]: ...

    @overload
    def __call__(
        self: "StepFunction[Parameters, dict[Key, Item]]", *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> dict[Key, StepOutput[Item]]: ...

    @overload
    def __call__(
        self: "StepFunction[Parameters, None]", *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> None: ...

    @overload
    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run((), args, kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> "StepFunction[Parameters, Result]": ...

    @overload
    def __get__(
        self: "StepFunction[Concatenate[Any, Rest], Result]", instance: object, owner: type | None = None
    ) -> "StepFunction[Rest, Result]": ...

    def __get__(self, instance: Any, owner: type | None = None) -> Callable:
        if instance is None:
            return self
        bound = lambda *args, **kwargs: self._run((instance,), args, kwargs)  # noqa: E731
        return functools.update_wrapper(bound, self._function)

    def _check_names(self) -> None:
        parameters = self._signature.parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return
        known = [parameter.name for parameter in parameters]
        unknown = sorted((self._whole | self._axes.keys()) - set(known))
        if unknown:
            raise UsageError(
                f"{self._label} has no argument {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(map(repr, known)) or 'none'}"
            )

    def _run(self, owner: tuple, args: tuple, kwargs: dict[str, Any]) -> Any:
        job = current.outside_step(f"the step function {self._label}")
        job.saves.check_before_step()
        job.before_step()
        seeds.check(job)
        first_call = job.life.enter_step()
        if self.is_of_training:
            job.recording.begin_step()
        state = job.routing.shared_state if job.has_model else Watch()
        if job.pipelined:
            state.begin_step(self._function, owner)
        # Arguments that cannot be split are an error of the step: the other ranks wait in it, and are to hear of it.
        bodies, samples, failure = [None] * job.microbatches, [], None
        if job.leads:
            try:
                bodies, samples = self._bodies(job, owner, args, kwargs)
            except Exception as error:
                failure = error

        def body(microbatch: int) -> Any:
            if failure is not None:
                raise failure
            return bodies[microbatch]()

        if job.leads:
            job.replicas.see_batch((args, kwargs))
        run = functools.partial(job.session.run_step, len(bodies), samples=samples, **job.model.in_step())
        with explained():
            if job.pipelined:
                result = self._run_pipelined(job, state, body, run, first_call, (owner, args, kwargs))
            else:
                result = self._run_here(job, body, run, first_call)
        if self.is_of_training:
            job.model.end_step()
            job.recording.end_step()
        job.step_check.end_step()
        return result

    def _run_here(self, job: current.Job, run_body: Callable, run: Callable, first_call: FirstCall | None) -> Any:
        """Runs a step of one partition; with `first_call` it is compared with the plain model."""
        if first_call is None:
            return run(body=run_body, merge=functools.partial(self._merge, job))

        try:
            return run(body=run_body, merge=functools.partial(self._merge, job))
        finally:
            first_call.cut_uncalled()

    def _run_pipelined(
        self,
        job: current.Job,
        state: Watch,
        run_body: Callable,
        run: Callable,
        first_call: FirstCall | None,
        call: tuple,
    ) -> Any:
        """Runs a step over several ranks. With `first_call` the model is cut in it."""
        deterministic = job.session.config.deterministic_server
        running = run.args[0]  # bodies that have not ended
        self._around.begin(*call)

        def body(microbatch: int) -> Any:
            nonlocal running
            state.modes.begin_microbatch(microbatch)
            if deterministic:  # torch has one cache for all threads: what is in it depends on who came first
                torch.set_autocast_cache_enabled(False)
            try:
                output = run_body(microbatch)
                state.modes.end_microbatch(microbatch)
            finally:
                state.end_microbatch(microbatch)
            running -= 1
            return output, (self._around.changes(), state.modes.left()) if running == 0 else None

        def merge_brought(outputs: list[tuple[Any, Any]], samples: list[int]) -> Any:
            state.look_back()
            for _, brought in [] if job.leads else outputs:
                if brought is not None:
                    changes, modes = brought
                    state.modes.end_step(modes)
                    if changes:
                        self._around.apply(changes)
            return self._merge(job, [output for output, _ in outputs], samples)

        drawn = other_random.states()
        cut = None if first_call is None else first_call.cut_uncalled
        try:
            result = run(body=body, merge=merge_brought, cut=cut, call=(self.name, call_sites.where()))
        except BaseException:
            state.end_step(failed=True)
            raise
        finally:
            if first_call is not None:
                first_call.end()
        state.end_step()
        other_random.tell_if_drawn(drawn)
        return result

    def _bodies(
        self, job: current.Job, owner: tuple, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[list[Callable[[], Any]], list[int]]:
        """One call of the function per microbatch, each in a copy of the caller's context, and its number of
        samples."""
        pieces, samples = self._batches.split(self._signature.bind(*owner, *args, **kwargs), len(owner), job)
        bodies = [functools.partial(self._body, arguments.args, arguments.kwargs) for arguments in pieces]
        return [functools.partial(contextvars.copy_context().run, body) for body in bodies], samples

    def _body(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        output = self._function(*args, **kwargs)
        self._require_model(current.job(), output)
        return pytree.map_tensors(torch.Tensor.detach, output) if self._detach_outputs else output

    def _require_model(self, job: current.Job, output: Any) -> None:
        """Refuses a step that trains a model which its job knows nothing of: its ranks would train apart."""
        if job.has_model or not (job.pipelined or job.session.config.ddp):
            return
        size = job.session.size
        if size > 1 and any(tensor.requires_grad for tensor in pytree.tensors(output)):
            raise UsageError(
                f"{self._label} trains a model that is not distributed, each of {size} ranks its own: wrap it before "
                "the first step, model = lamina.distribute(model)",
                code="model-none",
            )

    def _merge(self, job: current.Job, outputs: list[Any], samples: list[int]) -> Any:
        count = _lamina.counted(samples, len(outputs))
        outputs, samples = outputs[:count], samples[:count]
        if all(output is None for output in outputs):
            job.own(_functions_without_a_result).add(self._label)
        job.recording.see_results(outputs)
        return merge(outputs, samples)


def _functions_without_a_result() -> set[str]:
    """The names of a job's step functions that have returned nothing."""
    return set()


def _remedy(error: BaseException) -> str | None:
    """Says what to do about an error of torch's or Python's over what a step function may have given."""
    job = current.job_if_any()
    if job is None:
        return None
    if isinstance(error, RuntimeError) and "does not require grad and does not have a grad_fn" in str(error):
        return "results of step functions have no graph: call model.backward(loss) inside of the step function"
    if not isinstance(error, (AttributeError, TypeError)) or "NoneType" not in str(error):
        return None
    names = sorted(job.own(_functions_without_a_result))
    return names and (
        f"{' and '.join(names)} returned nothing, so a call of it gave None: with `return loss` in it, "
        f"{names[0]}(...).reduce_mean() is the loss of the batch"
    )


excepthook.add_remedy(_remedy)


def _label(function: Callable) -> str:
    """The name of a function, of that of a partial one, or of the class of an object that is called."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__)
