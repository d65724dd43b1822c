# SPDX-License-Identifier: Apache-2.0
"""Trainings of a script's own loop that outlive ranks."""

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lamina import _lamina
from lamina.elastic.kept import KeptSurvivors
from lamina.elastic.newcomers import EpochOverError, leaving_by_sigterm
from lamina.elastic.reading import Reading
from lamina.elastic.survivors import Survivors, why_not
from lamina.errors import DesyncError, PeerError, UsageError
from lamina.job import current
from lamina.job.arguments import require_same
from lamina.pipeline.distributed_model import DistributedModel
from lamina.script_state import generators
from lamina.torch_patches import grad_scaler
from lamina.util.checks import require_count

if TYPE_CHECKING:
    from lamina.job.keys import LayoutKeys

Result = TypeVar("Result")


class Run:
    """A training that goes on where ranks are lost, as long as most of the last ones are left, and where others join:

        run = lamina.Run(model, optimizer, loader=loader, schedule=schedule)

        @run.elastic                       # called again after each loss, and when others join
        def train(model, optimizer):
            for batch in run.batches(epochs=3): ...

    Copies of a model that are left have the model, the states of the optimizer and the schedule as they were after the
    last update of the one that has come furthest. An update that one of them has made counts, and any other one is made
    again. Buffers are as they were then, and random numbers with `seed`. A batch of all copies has the samples and the
    microbatches that it had, which those that there are share out, one more or less. A process that joins them runs the
    script up to `elastic` in a world of its own, and has there what the others have.

    Ranks with partitions, shards, slices or parts of states keep what they have in the memory of the host, each
    `keep_every` updates. Beside the next step each sends to another one what nobody else has. After a loss all go on
    from the newest version of which nothing is lost, in a layout that fits their number. So do they where others join
    or leave, with what they have then.

    Args:
        model: the job's.
        optimizer: the only one of the model, a DistributedOptimizer. Its step ends a batch.
        loader: that `batches` reads. With several copies of the model its sampler is a DistributedSampler.
        schedule: of its rates; its step follows the optimizer's at once.
        stateful: objects with `state_dict` and `load_state_dict` that all ranks have alike, and that also follow each
            update at once: a GradScaler, an average of whole weights. Steps that a GradScaler leaves out are updates.
        keep_every: so many updates lie between two versions, where ranks have parts that others have not. "auto": as
            few as take 2 % of the time.
        layouts: in which ranks with parts may go on, each as keys of `lamina.change`: the first that fits their number
            is taken. Without one that does, the model is in as many parts as the script has asked for, or in the
            nearest number that fits.

    Errors:
        ConfigError: a layout that no number of ranks allows; all copies would read the same.
        UsageError: several machines without `lamina run --elastic`; without `ddp`; tensors that lie in one memory; a
            loader that says itself what each of several copies reads.
    """

    def __init__(
        self,
        model: DistributedModel,
        optimizer: torch.optim.Optimizer,
        *,
        loader: Any = None,
        schedule: Any = None,
        stateful: Iterable[Any] = (),
        keep_every: int | str = 1,
        layouts: "Iterable[LayoutKeys]" = (),
    ):
        job = current.outside_step("lamina.Run()")
        if job.model is not model or [state.optimizer for state in job.optimizers] != [optimizer]:
            raise _refused("it takes the job's DistributedModel, and its only optimizer, a DistributedOptimizer")
        if why := why_not(job, keeps_parts=True):
            raise _refused(why)
        require_same(job.session, "world", "lamina.Run()", "elastic-refused", keep_every=keep_every)
        if keep_every != "auto":
            require_count(keep_every=keep_every)
        layouts = list(map(_to_json, layouts))
        job.session.require_layouts(layouts, of_copies=False)
        (state,) = job.optimizers
        self._reading = None if loader is None else Reading(loader)
        every = schedule, *_checked(stateful), self._reading
        self._training = _OwnLoop([each for each in every if each is not None])
        self._state, self._trained = state, (model, optimizer)
        self._with_parts = lambda: KeptSurvivors(model, state, self._training, keep_every, layouts)
        self._survivors = self._with_parts() if why_not(job) else Survivors(model, state, self._training)
        self._ends = False  # the epoch, for newcomers wait
        self._in_eval = False  # no module is in training mode while it trains
        state.after_step = self._note

    @property
    def updates(self) -> int:
        """Steps of the optimizer that count."""
        return self._training.progress

    def batches(self, epochs: int = 1) -> Iterator[Any]:
        """The batches of this copy that are left until so many epochs of the training are over, of the loader. A batch
        is over with the step of the optimizer that follows it. Where `train` is called again, that goes on after those
        that are: see [Note: batches that stay] in lamina/elastic/reading.py.

        Errors:
            UsageError: no loader was given, or others than there were cannot go on with it.
        """
        if self._reading is None:
            raise UsageError("lamina.Run: batches() reads its loader: give it one")
        require_count(epochs=epochs)
        return self._reading.until(epochs)

    def elastic(self, train: Callable[..., Result]) -> Result:
        """Calls `train` with model and optimizer, or where it takes one argument with the number of updates so far; and
        again after each loss, and when others have joined. Returns what it returns.

        Errors:
            PeerError: a rank was lost, and too few are left, or what it had is lost with it.
            SystemExit: in a process that was to join, where the job is over; after SIGTERM, with which a rank leaves
                after an update, and the others go on.
        """
        if self._survivors.begin() is None:
            self._survivors.keep_first()
        with leaving_by_sigterm(lambda: self._survivors.doorway), ExitStack() as undo:
            grad_scaler.tell_of_skips(self._state.optimizer, self._note, undo)
            if self._reading is not None:
                undo.callback(self._reading.end)
            return self._train(self._called(train))

    def _called(self, train: Callable[..., Result]) -> Callable[[], Result]:
        model, optimizer = self._trained
        try:
            inspect.signature(train).bind(model, optimizer)
        except TypeError:
            return lambda: train(self.updates)
        return lambda: train(model, optimizer)

    def _train(self, train: Callable[[], Result]) -> Result:
        while True:
            current.job().before_step, current.job().open_after = self._look, self._open_after
            self._in_eval = not _is_in_training_mode()
            try:
                result = train()
                self._survivors.end()
                current.job().before_step, current.job().open_after = lambda: None, None
                return result
            except (PeerError, DesyncError) as error:  # of a wait for one that has heard of a loss before
                lost = error
            except EpochOverError:
                lost = None
            self._ends = False
            told = self._survivors.go_on(lost)
            self._training.draw_again()
            is_again = len({progress for progress, word in told if progress >= 0}) == 1
            self._survivors.tell_going_on(self.updates - (not is_again), is_again)

    def _note(self) -> None:
        self._training.note_update()
        if self._reading is not None:
            self._reading.count()
        self._in_eval = not _is_in_training_mode()
        self._survivors.keep()
        self._ends = self._survivors.doorway.is_called()

    def _open_after(self, config: _lamina.Config) -> _lamina.Session:
        """See `Survivors.open_after`. In a layout with parts copies become ranks that keep these."""
        if isinstance(self._survivors, KeptSurvivors) or not _lamina.key_of_parts(config):
            return self._survivors.open_after(config)
        kept = self._with_parts()
        session = kept.open_after(config)
        kept.succeed(self._survivors)
        self._survivors = kept
        return session

    def _look(self) -> None:
        """Ends the epoch before the next step of the training."""
        is_evaluation = not torch.is_grad_enabled() or not (self._in_eval or _is_in_training_mode())
        if is_evaluation:  # which some ranks may make by themselves
            return
        if self._ends or self._survivors.look():
            raise EpochOverError("ranks join or leave, which lamina.Run sees to: let it pass")


def _is_in_training_mode() -> bool:
    return any(module.training for module in current.job().model.module.modules())


class _OwnLoop:
    """The loop of a script, as `Survivors` see it: its progress are its updates. What it draws from the generators of
    the process after an update it draws again, where that is the last one that counts."""

    def __init__(self, stateful: list[Any]):
        self.progress, self._stateful = 0, stateful
        self._drawn = {0: generators.states()}  # by updates: the last one, and those of which states were asked for
        self._of_versions: list[int] = []

    def note_update(self) -> None:
        """An update is made."""
        if self.progress not in self._of_versions:
            self._drawn.pop(self.progress, None)
        self.progress += 1
        self._drawn[self.progress] = generators.states()

    def draw_again(self) -> None:
        """All go on from the last update: generators are as they were then, where this rank has made it."""
        if self.progress in self._drawn:
            generators.put_states(self._drawn[self.progress])
        self._drawn[self.progress] = generators.states()

    def word(self) -> None:
        """Nothing is to be told."""

    def moved(self, is_held: bool) -> None:
        """Gradients are forgotten, and so is what was found in them."""
        for each in self._stateful:
            if isinstance(each, torch.amp.GradScaler):
                grad_scaler.forget(each)

    def given(self) -> None:
        """Nothing is needed besides."""

    def take_given(self, given: None) -> None:
        """Takes nothing."""

    def all_leave(self) -> None:
        """Nothing is left to be done."""

    def state(self) -> Any:
        """The progress, and the states of what follows each update, as they are now."""
        self._of_versions = [*self._of_versions[-2:], self.progress]
        self._drawn = {updates: drawn for updates, drawn in self._drawn.items() if updates in self._of_versions}
        return self.progress, copy.deepcopy([each.state_dict() for each in self._stateful])

    def take(self, state: Any) -> None:
        """Takes what another copy gave."""
        self.progress, states = state
        for each, its in zip(self._stateful, states, strict=True):
            each.load_state_dict(its)


def _checked(stateful: Iterable[Any]) -> list[Any]:
    for each in (stateful := list(stateful)):
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise _refused(f"{type(each).__name__} among `stateful` has no state_dict() and load_state_dict()")
    return stateful


def _to_json(keys: Any) -> str:
    try:
        return json.dumps(keys)
    except (TypeError, ValueError) as error:
        raise _refused(f"a layout cannot be written as JSON: {error}") from None


def _refused(why: str) -> UsageError:
    return UsageError(f"lamina.Run: {why}", code="elastic-refused")
