# SPDX-License-Identifier: Apache-2.0
"""The table of the Trainer's arguments: their names, types and defaults, and what holds of them."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lamina.composer import argument_readers as read
from lamina.composer.argument_rules import GivenArguments, Rules, argument, flag, not_yet, refused, rules_of
from lamina.composer.devices import Device, get_device
from lamina.composer.evaluator import Evaluator, When, ensure_evaluators, ensure_when
from lamina.composer.loggers import as_destinations
from lamina.composer.loggers.destination import text_stream
from lamina.composer.model import require_model
from lamina.composer.precision import ensure_precision
from lamina.composer.reproducibility import require_seed
from lamina.composer.schedulers import require_schedulers
from lamina.dist.ranks import get_global_rank
from lamina.errors import ConfigError
from lamina.job import current
from lamina.job.arguments import require_same
from lamina.pipeline.compiled_parts import in_place
from lamina.trainer import checks
from lamina.trainer.data_spec import DataSpec, ensure_data_spec
from lamina.trainer.events import Algorithm, Callback
from lamina.trainer.time import Time
from lamina.util.checks import nearest
from lamina.util.told import tell

_SAVES, _LOADS, _EVALUATES = {"beside": ("save_folder",)}, {"beside": ("load_path",)}, {"beside": ("eval_dataloader",)}
_TIMELINE = "lamina.timeline shows what each rank does"


@dataclasses.dataclass(kw_only=True)
class Arguments:
    """All arguments of a Trainer; see there."""

    model: Any = argument(read=read.by(lambda given: in_place(require_model(given))))
    train_dataloader: Iterable | DataSpec | dict[str, Any] | None = argument(
        None, read.optional(read.by(ensure_data_spec))
    )
    train_dataloader_label: str = argument("train", checks.text, beside=("train_dataloader",))
    train_subset_num_batches: int = argument(-1, checks.count_or_all, is_alike=True)
    spin_dataloaders: bool = refused(True, "a training goes on with its next batch in any case")
    max_duration: int | str | Time | None = argument(None, read.optional(read.duration), is_alike=True)
    algorithms: Algorithm | Sequence[Algorithm] | None = argument(None, read.all_of(Algorithm))
    algorithm_passes: Any = refused(None, "algorithms hear of an event in the order of the list")
    optimizers: torch.optim.Optimizer | None = argument(None, read.optimizer)
    schedulers: Any = argument(None, read.by(checks.listed))
    scale_schedule_ratio: float = refused(1.0, "say the shorter max_duration")
    step_schedulers_every_batch: bool | None = argument(
        None, read.optional(checks.flag), is_alike=True, beside=("schedulers",)
    )
    eval_dataloader: Iterable | DataSpec | Evaluator | Sequence[Evaluator] | None = argument(
        None, read.by(ensure_evaluators)
    )
    eval_interval: int | str | Time | When = argument(
        1, read.by(ensure_when), is_alike=True, of_each="eval_interval", **_EVALUATES
    )
    eval_subset_num_batches: int = argument(
        -1, checks.count_or_all, is_alike=True, of_each="subset_num_batches", **_EVALUATES
    )
    callbacks: Callback | Sequence[Callback] | None = argument(None, read.all_of(Callback))
    loggers: Any = argument(None, read.by(as_destinations))
    run_name: str | None = argument(None, read.optional(read.run_name))
    progress_bar: bool = flag(True)
    log_to_console: bool = flag()
    console_stream: Any = argument("stderr", read.by(text_stream), beside=("log_to_console", "progress_bar"))
    console_log_interval: int | str | Time = argument("1ba", read.interval, beside=("log_to_console",))
    log_traces: bool = refused(False, _TIMELINE)
    auto_log_hparams: bool = flag(beside=("loggers", "log_to_console"))
    load_path: str | None = argument(None, read.optional(read.checkpoint), is_alike=True)
    load_object_store: Any = refused(None, "load_path is a folder that all ranks see")
    load_weights_only: bool = flag(is_alike=True, **_LOADS)
    load_strict_model_weights: bool = flag(is_alike=True, **_LOADS)
    load_progress_bar: bool = flag(True)
    load_ignore_keys: list[str] | Callable | None = not_yet()
    load_exclude_algorithms: list[str] | None = not_yet()
    save_folder: str | None = argument(None, read.optional(checks.path), is_alike=True)
    save_filename: str = argument("ep{epoch}-ba{batch}-rank{rank}.pt", checks.text, is_alike=True, **_SAVES)
    save_latest_filename: str | None = argument("latest-rank{rank}.pt", read.optional(checks.text), **_SAVES)
    save_overwrite: bool = flag(is_alike=True, **_SAVES)
    save_interval: int | str | Time | When = argument("1ep", read.interval_or_function, is_alike=True, **_SAVES)
    save_weights_only: bool = flag(is_alike=True, **_SAVES)
    save_ignore_keys: list[str] | Callable | None = not_yet()
    save_metrics: bool = refused(False, "a Callback's state_dict() is saved")
    save_num_checkpoints_to_keep: int = argument(-1, read.count_none_or_all, is_alike=True, **_SAVES)
    autoresume: bool = flag(is_alike=True)
    deepspeed_config: dict[str, Any] | None = argument(None)
    fsdp_config: dict[str, Any] | None = argument(None)
    fsdp_auto_wrap: bool = refused(
        True, "_fsdp_wrap, fsdp_wrap_fn and fsdp_config's min_params say what becomes a unit"
    )
    device: str | torch.device | Device | None = argument(None, read.by(get_device))
    precision: str | None = argument(None, is_alike=True)
    precision_config: dict[str, Any] | None = refused(None, "fp8 is not there")
    grad_accum: int | str | None = argument(1, read.optional(read.number_of_pieces), is_alike=True)
    device_train_microbatch_size: int | str | None = argument(None, read.optional(read.pieces), is_alike=True)
    seed: int | None = argument(None, read.optional(read.by(require_seed)), key="seed")
    deterministic_mode: bool = flag()
    dist_timeout: float = argument(1800.0, read.seconds, key="timeout_s")
    ddp_sync_strategy: Any = refused(None, "gradients are averaged once for each batch")
    profiler: Any = refused(None, _TIMELINE)
    python_log_level: str | None = argument(None, read.optional(read.log_level))
    compile_config: dict[str, Any] | None = refused(None, "give a model that torch.compile has wrapped")
    accumulate_train_batch_on_tokens: bool = flag(is_alike=True)
    lamina_config: Mapping[str, Any] | None = argument(None, read.optional(read.init_keys))
    elastic_config: Mapping[str, Any] | None = argument(None, read.elastic, is_alike=True)

    @classmethod
    def of(cls, given: dict[str, Any]) -> "Arguments":
        """The arguments of a call, with those that are made of others: DataSpecs, Evaluators, lists and times. Those
        without an effect are told.

        Errors:
            ConfigError: all that is wrong with them.
        """
        problems = [f"{name}: there is no such argument{_hint(name)}" for name in given if name not in _RULES]
        found = cls(model=None)
        vars(found).update({name: value for name, value in given.items() if name in _RULES})
        problems += [*found._read(), *found._contradictions(), *found._take_device()]
        if problems:
            raise ConfigError("\n  ".join(["Trainer: " + problems[0], *problems[1:]]))
        _tell("Trainer", GivenArguments(_RULES, given, _DEFAULTS).idle(found.eval_dataloader))
        return found

    def _read(self) -> Iterator[str]:
        """Puts in the place of each argument what it stands for, and says what is wrong."""
        for name, rules in _RULES.items():
            given, default = getattr(self, name), _DEFAULTS[name]
            if problem := rules.problem(given, default):
                yield f"{name}: {problem}"
            try:
                setattr(self, name, given if rules.read is None else rules.read(name, given))
            except (ConfigError, TypeError) as error:
                yield _named(name, error)
                setattr(self, name, default)

    def _contradictions(self) -> Iterator[str]:
        """Says where arguments do not go together."""
        if isinstance(self.model, torch.nn.Module) and not _trains(self.optimizers, self.model):
            yield "optimizers: its parameters are not the model's: make it of model.parameters()"
        try:
            require_schedulers(self.schedulers, [self.optimizers])
        except ConfigError as error:
            yield _named("schedulers", error)
        if self.device_train_microbatch_size is not None and self.grad_accum not in (None, 1):
            yield _SAME_PIECES
        if self.autoresume and not (self.save_folder and self.run_name):
            yield "autoresume goes on from the newest checkpoint of save_folder, in a run with a run_name: give both"
        if self.save_weights_only and (self.autoresume or self.save_num_checkpoints_to_keep != -1):
            yield "save_weights_only: autoresume and save_num_checkpoints_to_keep need checkpoints of a whole training"
        if isinstance(self.lamina_config, Mapping) and self.lamina_config.get("microbatches", 1) != 1:
            yield "lamina_config: grad_accum and device_train_microbatch_size say how many microbatches"

    def _take_device(self) -> Iterator[str]:
        """Has the device that lamina_config names, and says what is wrong with that."""
        own = self.lamina_config.get("device", "auto") if isinstance(self.lamina_config, Mapping) else "auto"
        if own == "auto" or self.device is None:
            return
        try:
            found = get_device(own)
        except ConfigError as error:
            yield _named("lamina_config", error)
            return
        if self.device.key not in ("auto", found.key):
            yield f"device: it is {self.device.key!r}, but lamina_config has {found.key!r}: say it once"
        self.device = found


_RULES = rules_of(Arguments)
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Arguments)}
# Arguments of `fit`: some of the Trainer, and two of its own.
_RULES_OF_FIT = _RULES | {"duration": Rules(read=read.duration), "reset_time": Rules(read=checks.flag)}
_SAME_PIECES = "grad_accum and device_train_microbatch_size say the same: give one of them"


def read_for_fit(given: Mapping[str, Any], defaults: Mapping[str, Any], precision: Any) -> dict[str, Any]:
    """The arguments of a call of `fit`, by the table; None stands for what the Trainer has. Those without an effect are
    told.

    Args:
        given: all of them.
        defaults: those of `fit`.
        precision: the Trainer's.

    Errors:
        ConfigError: the first that is wrong, or says otherwise than the Trainer.
    """
    found = dict(given)
    for name, default in defaults.items():
        rules, value = _RULES_OF_FIT[name], given[name]
        if problem := rules.problem(value, default):
            raise ConfigError(f"fit: {name}={value!r}: {problem}")
        if rules.read is not None and value is not None:
            found[name] = rules.read(name, value)
    if given["precision"] is not None and ensure_precision(given["precision"]) is not precision:
        own = f"the Trainer has {precision.value}, for all calls: say it there"
        raise ConfigError(f"fit: precision={given['precision']!r}, but {own}")
    if None not in (given["grad_accum"], given["device_train_microbatch_size"]):
        raise ConfigError(f"fit: {_SAME_PIECES}")
    _tell("fit", GivenArguments(_RULES_OF_FIT, given, defaults).idle(found["eval_dataloader"] or []))
    return found


def require_alike(given: dict[str, Any]) -> None:
    """UsageError where ranks have given a Trainer different arguments, with the values."""
    alike = {name: given.get(name) for name, rules in _RULES.items() if rules.is_alike}
    texts = {name: str(value) if isinstance(value, Time) else value for name, value in alike.items()}
    evaluators = ", ".join(each.label for each in ensure_evaluators(given.get("eval_dataloader")))
    require_same(current.session(), "world", "Trainer", "trainer-alike", **texts, evaluators=evaluators)


def signature() -> inspect.Signature:
    """The signature of a Trainer."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = inspect.signature(Arguments).parameters.values()
    return inspect.Signature([own, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in named)])


def _trains(optimizer: torch.optim.Optimizer | None, model: torch.nn.Module) -> bool:
    """Tells whether the optimizer's parameters are the model's. One of the Trainer before gets its parameters back when
    that one ends."""
    if optimizer is None or hasattr(optimizer, "optimizer"):
        return True
    own = set(map(id, model.parameters()))
    return all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def _hint(name: str) -> str:
    found = nearest(name, _RULES, 0.6)
    return f"; the nearest is {found}" if found else ""


def _named(name: str, error: Exception) -> str:
    """The text of an argument's error, with its name."""
    return str(error) if str(error).startswith((f"{name}=", f"{name}:")) else f"{name}: {error}"


def _tell(where: str, lines: Iterable[str]) -> None:
    for line in lines if get_global_rank() == 0 else ():
        tell(f"{where}: {line}")
