# SPDX-License-Identifier: Apache-2.0
"""Schedules of learning rates: a multiplier of the initial one, as a function of the time of a training.

[Note: times of a schedule] A schedule converts its times to one unit before it looks at them. Epochs, and parts of a
training that is counted in epochs, become batches: of all ranks together, so any number of ranks has the same. Where
epochs had other batches before, a part of an epoch counts as that, in batches as they are now.
"""

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from lamina.composer.state import State
from lamina.errors import ConfigError
from lamina.trainer import checks
from lamina.trainer.time import Time, TimeUnit, named_time


class ComposerScheduler:
    """A schedule. Any function of a State is one, too, and any of a State and a ratio by which times are stretched.

    Errors:
        ConfigError: an argument that is no time, or no number; with the argument's name.
    """

    def schedule(self, state: State, ssr: float = 1.0) -> float:
        """The multiplier of the initial learning rate at the state's time."""
        raise NotImplementedError(f"{type(self).__name__} has neither schedule(state, ssr) nor __call__")

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return self.schedule(state, ssr)

    def _time(self, name: str, given: str | Time, positive: bool = False) -> Time:
        return named_time(f"{type(self).__name__}: {name}", given, positive)

    def _number(self, name: str, given: float) -> float:
        return checks.number(f"{type(self).__name__}: {name}", given)


class StepScheduler(ComposerScheduler):
    """Multiplies it by `gamma` after each `step_size`."""

    def __init__(self, step_size: str | Time, gamma: float = 0.1):
        self.step_size, self.gamma = self._time("step_size", step_size, positive=True), self._number("gamma", gamma)

    def schedule(self, state: State, ssr: float = 1.0) -> float:
        now, size = _numbers(state, ssr, self.step_size)
        return self.gamma ** int(now // _positive(size, self.step_size))


class MultiStepScheduler(ComposerScheduler):
    """Multiplies it by `gamma` at each milestone."""

    def __init__(self, milestones: Sequence[str | Time], gamma: float = 0.1):
        if isinstance(milestones, str) or not isinstance(milestones, Sequence):
            raise checks.wrong(f"{type(self).__name__}: milestones", milestones, "a list of times")
        self.milestones = [self._time("milestones", milestone) for milestone in milestones]
        self.gamma = self._number("gamma", gamma)

    def schedule(self, state: State, ssr: float = 1.0) -> float:
        factor = 1.0
        for milestone in self.milestones:
            now, passed_at = _numbers(state, ssr, milestone)
            if now >= passed_at:
                factor *= self.gamma
        return factor


class ConstantScheduler(ComposerScheduler):
    """Is `alpha` until `t_max`, and then 1."""

    def __init__(self, alpha: float = 1.0, t_max: str | Time = "1dur"):
        self.alpha, self.t_max = self._number("alpha", alpha), self._time("t_max", t_max)

    def schedule(self, state: State, ssr: float = 1.0) -> float:
        now, end = _numbers(state, ssr, self.t_max)
        return self.alpha if now < end else 1.0


class ExponentialScheduler(ComposerScheduler):
    """Multiplies it by `gamma` in each `decay_period`, smoothly."""

    def __init__(self, gamma: float, decay_period: str | Time = "1ep"):
        self.gamma = self._number("gamma", gamma)
        self.decay_period = self._time("decay_period", decay_period, positive=True)

    def schedule(self, state: State, ssr: float = 1.0) -> float:
        now, period = _numbers(state, ssr, self.decay_period)
        return self.gamma ** (now / _positive(period, self.decay_period))


class _Curve(ComposerScheduler):
    """A curve from now 0 to `t_max`, behind which it stays as it is there."""

    t_max: Time

    def schedule(self, state: State, ssr: float = 1.0) -> float:
        return self.at(_part(*_numbers(state, ssr, self.t_max)))

    def at(self, part: float) -> float:
        """The multiplier when such a part of it has passed, from 0 to 1."""
        raise NotImplementedError


class LinearScheduler(_Curve):
    """Goes from `alpha_i` to `alpha_f` on a line.

    Args:
        alpha_i, alpha_f: the first multiplier and the last.
        t_max: when the last one is reached.
    """

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: str | Time = "1dur"):
        self.alpha_i, self.alpha_f = self._number("alpha_i", alpha_i), self._number("alpha_f", alpha_f)
        self.t_max = self._time("t_max", t_max)

    def at(self, part: float) -> float:
        return self.alpha_i + part * (self.alpha_f - self.alpha_i)


class CosineAnnealingScheduler(_Curve):
    """Goes from 1 to `alpha_f` on half a wave of a cosine."""

    def __init__(self, t_max: str | Time = "1dur", alpha_f: float = 0.0):
        self.t_max, self.alpha_f = self._time("t_max", t_max), self._number("alpha_f", alpha_f)

    def at(self, part: float) -> float:
        return self.alpha_f + (1.0 - self.alpha_f) * (1 + math.cos(part * math.pi)) / 2


class PolynomialScheduler(_Curve):
    """Goes from 1 to `alpha_f` as a power of the part that is left.

    Args:
        power: of the part that is left.
        t_max: when the last multiplier is reached.
        alpha_f: that one.
    """

    def __init__(self, power: float, t_max: str | Time = "1dur", alpha_f: float = 0.0):
        self.power, self.alpha_f = self._number("power", power), self._number("alpha_f", alpha_f)
        self.t_max = self._time("t_max", t_max)

    def at(self, part: float) -> float:
        return self.alpha_f + (1 - part) ** self.power * (1.0 - self.alpha_f)


class CosineAnnealingWarmRestartsScheduler(ComposerScheduler):
    """Goes from 1 to `alpha_f` on half a wave of a cosine in `t_0`, and again in `t_mult` of the time before.

    Args:
        t_0: how long the first wave is.
        t_mult: how many times as long each next one is.
        alpha_f: the multiplier at the end of each.
    """

    def __init__(self, t_0: str | Time, t_mult: float = 1.0, alpha_f: float = 0.0):
        self.t_0, self.alpha_f = self._time("t_0", t_0, positive=True), self._number("alpha_f", alpha_f)
        self.t_mult = checks.number(f"{type(self).__name__}: t_mult", t_mult, 0)

    def schedule(self, state: State, ssr: float = 1.0) -> float:
        now, length = _numbers(state, ssr, self.t_0)
        is_whole, start = isinstance(length, int), 0
        while start + _positive(length, self.t_0) <= now:
            start, length = start + length, length * self.t_mult
            length = int(length) if is_whole else length
        return CosineAnnealingScheduler(alpha_f=self.alpha_f).at((now - start) / length)


class _Warmed(ComposerScheduler):
    """Goes from 0 to `peak` on a line in `t_warmup`, and then as it is `after` that."""

    peak = 1.0

    def __init__(self, t_warmup: str | Time, scale_warmup: bool):
        self.t_warmup = self._time("t_warmup", t_warmup)
        self.scale_warmup = checks.flag(f"{type(self).__name__}: scale_warmup", scale_warmup)

    def schedule(self, state: State, ssr: float = 1.0) -> float:
        ratio = ssr if self.scale_warmup else 1.0
        warmup, (now, _) = _converted(self.t_warmup, state, ratio), _numbers(state, ratio, self.t_warmup)
        if not warmup.value:
            warnings.warn(f"{type(self).__name__}: {self.t_warmup} of this training is no warmup at all", stacklevel=2)
        after = self.after(state, warmup, ssr)  # errors of its times come before the first batch
        return now / warmup.value * self.peak if now < warmup.value else after

    def after(self, state: State, warmup: Time, ssr: float) -> float:
        """The multiplier when the warmup has ended."""
        raise NotImplementedError


class MultiStepWithWarmupScheduler(_Warmed):
    """Multiplies it by `gamma` at each milestone, after a warmup.

    Args:
        t_warmup: how long the rate goes up from 0.
        milestones: times at which the rate changes.
        gamma: by what it is multiplied there.
        scale_warmup: whether a ratio that stretches times stretches the warmup, too.
    """

    def __init__(
        self, t_warmup: str | Time, milestones: Sequence[str | Time], gamma: float = 0.1, scale_warmup: bool = False
    ):
        super().__init__(t_warmup, scale_warmup)
        self.steps = MultiStepScheduler(milestones, gamma)

    def after(self, state: State, warmup: Time, ssr: float) -> float:
        return self.steps(state, ssr)


class _WarmedCurve(_Warmed):
    """A curve from the warmup's end to its own `t_max`, which is counted from the training's beginning."""

    curve: _Curve

    def after(self, state: State, warmup: Time, ssr: float) -> float:
        end = _converted(self.curve.t_max, state, ssr)
        if end.unit is not warmup.unit:
            raise ConfigError(
                f"{type(self).__name__}: t_warmup={self.t_warmup} and t_max={self.curve.t_max} are not counted in the "
                f"same unit: in a training of {state.max_duration} one is {warmup.unit.value}, one {end.unit.value}"
            )
        now, _ = _numbers(state, ssr, self.curve.t_max)
        return self.curve.at(_part(now - warmup.value, end.value - warmup.value) if end > warmup else 0.0)


class LinearWithWarmupScheduler(_WarmedCurve):
    """Goes from `alpha_i` to `alpha_f` on a line, after a warmup.

    Args:
        t_warmup: how long the rate goes up from 0.
        alpha_i, alpha_f: the multiplier after that, and the last.
        t_max: when the last one is reached.
        scale_warmup: whether a ratio that stretches times stretches the warmup, too.
    """

    def __init__(
        self,
        t_warmup: str | Time,
        alpha_i: float = 1.0,
        alpha_f: float = 0.0,
        t_max: str | Time = "1dur",
        scale_warmup: bool = False,
    ):
        super().__init__(t_warmup, scale_warmup)
        self.peak, self.curve = alpha_i, LinearScheduler(alpha_i, alpha_f, t_max)


class ConstantWithWarmupScheduler(LinearWithWarmupScheduler):
    """Is `alpha`, after a warmup.

    Args:
        t_warmup: how long the rate goes up from 0.
        alpha: the multiplier after that.
        t_max: no effect, for it is constant.
        scale_warmup: whether a ratio that stretches times stretches the warmup, too.
    """

    def __init__(
        self, t_warmup: str | Time, alpha: float = 1.0, t_max: str | Time = "1dur", scale_warmup: bool = False
    ):
        super().__init__(t_warmup, alpha, alpha, t_max, scale_warmup)


class CosineAnnealingWithWarmupScheduler(_WarmedCurve):
    """Goes from 1 to `alpha_f` on half a wave of a cosine, after a warmup.

    Args:
        t_warmup: how long the rate goes up from 0.
        t_max: when the last multiplier is reached.
        alpha_f: that one.
        scale_warmup: whether a ratio that stretches times stretches the warmup, too.
    """

    def __init__(
        self, t_warmup: str | Time, t_max: str | Time = "1dur", alpha_f: float = 0.0, scale_warmup: bool = False
    ):
        super().__init__(t_warmup, scale_warmup)
        self.curve = CosineAnnealingScheduler(t_max, alpha_f)


class PolynomialWithWarmupScheduler(_WarmedCurve):
    """Goes from 1 to `alpha_f` as a power of the part that is left, after a warmup.

    Args:
        t_warmup: how long the rate goes up from 0.
        power: of the part that is left.
        t_max: when the last multiplier is reached.
        alpha_f: that one.
        scale_warmup: whether a ratio that stretches times stretches the warmup, too.
    """

    def __init__(
        self,
        t_warmup: str | Time,
        power: float = 2.0,
        t_max: str | Time = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ):
        super().__init__(t_warmup, scale_warmup)
        self.curve = PolynomialScheduler(power, t_max, alpha_f)


Scheduler = LRScheduler | Callable[..., float]


class Follower(LambdaLR):
    """Has an optimizer follow schedules: rates depend on the State alone."""

    def set_rates(self) -> None:
        """Sets the rates of now, after the training's time or its duration has become another between two batches."""
        for group, rate, multiplier in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = rate * multiplier(0)


def require_schedulers(schedulers: Sequence[Scheduler], optimizers: Sequence[Any]) -> list[Scheduler]:
    """Schedulers for these optimizers, as they are.

    Errors:
        ConfigError: what is none; torch's and others together, and torch's of another optimizer.
    """
    torchs = [each for each in schedulers if isinstance(each, LRScheduler)]
    if torchs and len(torchs) < len(schedulers):
        raise ConfigError("schedulers: torch's go on from the rate that is there, the others set it: give one kind")
    for each in torchs:
        if isinstance(each, ReduceLROnPlateau):
            raise ConfigError("schedulers: ReduceLROnPlateau takes a number in its step, which the Trainer has not")
        if not any(each.optimizer is optimizer for optimizer in optimizers):
            raise ConfigError(f"schedulers: {type(each).__name__} is of another optimizer than the Trainer's")
    for each in [] if torchs else schedulers:
        _arguments_of(each, None, 1.0)
    return list(schedulers)


def compile_composer_scheduler(scheduler: Callable[..., float], state: State, ssr: float = 1.0) -> LRScheduler:
    """A scheduler of torch's that has the state's optimizer follow a schedule; its steps set what the state's time
    says.

    Args:
        scheduler: a schedule.
        state: of the training; its optimizer follows.
        ssr: a ratio by which times are stretched.
    """
    return _follow([scheduler], state, ssr)


def bound_schedulers(schedulers: Sequence[Scheduler], state: State) -> list[LRScheduler]:
    """Schedulers of torch's for the state's optimizer: those as they are, or one that follows the product of schedules.
    The state knows its duration, and the number of batches of its loader.

    Errors:
        ConfigError: torch's and others together, torch's of another optimizer, and times that cannot be converted.
    """
    found = require_schedulers(schedulers, state.optimizers)
    if not any(isinstance(each, LRScheduler) for each in found):
        return [_follow(found, state, 1.0)] if found else []
    return found


def steps_every_batch(schedulers: Sequence[Scheduler], given: bool | None = None) -> bool:
    """Tells whether schedulers make a step after each batch, and not after each epoch, where it is not `given`: torch's
    own are counted in epochs."""
    return not any(isinstance(each, LRScheduler) for each in schedulers) if given is None else given


def _follow(schedules: Sequence[Callable[..., float]], state: State, ssr: float) -> LRScheduler:
    arguments = [_arguments_of(each, state, ssr) for each in schedules]

    def multiplier(_: int) -> float:
        return math.prod(_multiplier(each, given) for each, given in zip(schedules, arguments, strict=True))

    (optimizer,) = state.optimizers
    return Follower(optimizer, multiplier)


def _multiplier(schedule: Callable[..., float], arguments: tuple[Any, ...]) -> float:
    """Returns the number that a schedule gives for now.

    Errors:
        ConfigError: no finite number; a function that takes its argument for a number, as those of torch's LambdaLR do.
    """
    try:
        found = schedule(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"schedulers: {schedule!r} failed with {type(error).__name__}: {error}. It is called with the State: "
            "state.timestamp.batch.value is the number of batches, state.timestamp.epoch.value that of epochs"
        ) from error
    try:
        number = found if isinstance(found, (int, float)) else found.item()
        is_one = math.isfinite(number)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        is_one = False
    if not is_one:
        raise ConfigError(f"schedulers: {schedule!r} gave {found!r}, where a finite number multiplies the rate")
    return number


def _arguments_of(schedule: Callable[..., float], state: State | None, ssr: float) -> tuple[Any, ...]:
    """The arguments that a schedule takes: the state, and the ratio if it does."""
    if not callable(schedule) or isinstance(schedule, type):
        raise ConfigError(f"schedulers: {schedule!r} is none: torch's are, those of lamina.trainer, and functions")
    for arguments in ((state, ssr), (state,)):
        with contextlib.suppress(TypeError):
            inspect.signature(schedule).bind(*arguments)
            break
    else:
        raise ConfigError(f"schedulers: {schedule!r} is not a function of the State")
    if ssr != 1.0 and len(arguments) == 1:
        raise ConfigError("scale_schedule_ratio needs schedules that take it: schedule(state, ssr)")
    return arguments


def _converted(time: Time, state: State, ssr: float) -> Time:
    """See [Note: times of a schedule]."""
    value, unit = time.value * ssr, time.unit
    if unit is TimeUnit.DURATION:
        if state.max_duration is None:
            raise ConfigError(f"{time} of a training without max_duration is no time")
        # The whole training has been stretched already.
        value, unit = time.value * state.max_duration.value, state.max_duration.unit
    if unit is TimeUnit.EPOCH:
        if state.dataloader_len is None:
            raise ConfigError(f"a schedule of {time} needs a loader with a length: count it in batches")
        value, unit = value * int(state.dataloader_len), TimeUnit.BATCH
    if unit is TimeUnit.TOKEN and not state.counts_tokens:
        raise ConfigError(
            f"a schedule of {time} stays where it begins, for nothing counts the loader's tokens: "
            "DataSpec(loader, get_num_tokens_in_batch=...) does"
        )
    return Time(int(round(value, 6)) if unit.is_whole else value, unit)  # 0.29 of 100 is not quite 29


def _numbers(state: State, ssr: float, time: Time) -> tuple[float, float]:
    """The state's time, and another one, converted to one unit."""
    converted, now = _converted(time, state, ssr), state.timestamp
    unit = state.max_duration.unit if time.unit is TimeUnit.DURATION else time.unit
    return state.batches() if unit is TimeUnit.EPOCH else now.get(converted.unit).value, converted.value


def _part(now: float, end: float) -> float:
    return min(now / end, 1.0) if end > 0 else 1.0


def _positive(value: float, time: Time) -> float:
    if value <= 0:
        raise ConfigError(f"{time} is less than one batch, sample or token of this training: a schedule would not move")
    return value
