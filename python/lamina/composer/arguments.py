# SPDX-License-Identifier: Apache-2.0
"""Arguments of the Trainer: their names, defaults and errors."""

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lamina.composer.devices import Device, get_device
from lamina.composer.evaluator import Evaluator, When, ensure_evaluators, ensure_when
from lamina.composer.idle_arguments import tell_idle_of_trainer
from lamina.composer.loggers import as_destinations
from lamina.composer.loggers.destination import text_stream
from lamina.composer.model import require_model
from lamina.composer.precision import ensure_precision
from lamina.composer.reproducibility import require_seed
from lamina.composer.schedulers import require_schedulers
from lamina.errors import ConfigError
from lamina.job import current
from lamina.job.arguments import require_same
from lamina.pipeline.compiled_parts import in_place
from lamina.trainer import checks
from lamina.trainer.checkpoints import found_checkpoint
from lamina.trainer.data_spec import DataSpec, ensure_data_spec
from lamina.trainer.events import Algorithm, Callback
from lamina.trainer.time import EPOCH_OR_BATCH, Time, TimeUnit, named_time
from lamina.util.checks import nearest

# Composer's that have no sense here, with what is there in their place.
_NEVER = {
    "algorithm_passes": "algorithms hear of an event in the order of the list",
    "scale_schedule_ratio": "say the shorter max_duration",
    "load_object_store": "load_path is a folder that all ranks see",
    "profiler": "lamina.timeline shows what each rank does",
    "ddp_sync_strategy": "gradients are averaged once for each batch",
    "log_traces": "lamina.timeline shows what each rank does",
    "spin_dataloaders": "a training goes on with its next batch in any case",
    "fsdp_auto_wrap": "_fsdp_wrap, fsdp_wrap_fn and fsdp_config's min_params say what becomes a unit",
    "compile_config": "give a model that torch.compile has wrapped",
    "precision_config": "fp8 is not there",
    "save_metrics": "a Callback's state_dict() is saved",
}
# Arguments that are the same on all ranks; init compares what becomes its keys.
_ALIKE = (
    *("max_duration", "train_subset_num_batches", "step_schedulers_every_batch", "grad_accum", "precision"),
    *("device_train_microbatch_size", "eval_interval", "eval_subset_num_batches", "load_path", "load_weights_only"),
    *("load_strict_model_weights", "save_folder", "save_filename", "save_overwrite", "save_interval", "autoresume"),
    *("save_weights_only", "save_num_checkpoints_to_keep", "accumulate_train_batch_on_tokens"),
)
_NOT_YET = ("load_ignore_keys", "load_exclude_algorithms", "save_ignore_keys")
_MOST_PIECES = 2**31 - 1


@dataclasses.dataclass(kw_only=True)
class Arguments:
    """All arguments of a Trainer; see there."""

    model: Any
    train_dataloader: Iterable | DataSpec | dict[str, Any] | None = None
    train_dataloader_label: str = "train"
    train_subset_num_batches: int = -1
    spin_dataloaders: bool = True
    max_duration: int | str | Time | None = None
    algorithms: Algorithm | Sequence[Algorithm] | None = None
    algorithm_passes: Any = None
    optimizers: torch.optim.Optimizer | None = None
    schedulers: Any = None
    scale_schedule_ratio: float = 1.0
    step_schedulers_every_batch: bool | None = None
    eval_dataloader: Iterable | DataSpec | Evaluator | Sequence[Evaluator] | None = None
    eval_interval: int | str | Time | When = 1
    eval_subset_num_batches: int = -1
    callbacks: Callback | Sequence[Callback] | None = None
    loggers: Any = None
    run_name: str | None = None
    progress_bar: bool = True
    log_to_console: bool = False
    console_stream: Any = "stderr"
    console_log_interval: int | str | Time = "1ba"
    log_traces: bool = False
    auto_log_hparams: bool = False
    load_path: str | None = None
    load_object_store: Any = None
    load_weights_only: bool = False
    load_strict_model_weights: bool = False
    load_progress_bar: bool = True
    load_ignore_keys: list[str] | Callable | None = None
    load_exclude_algorithms: list[str] | None = None
    save_folder: str | None = None
    save_filename: str = "ep{epoch}-ba{batch}-rank{rank}.pt"
    save_latest_filename: str | None = "latest-rank{rank}.pt"
    save_overwrite: bool = False
    save_interval: int | str | Time | When = "1ep"
    save_weights_only: bool = False
    save_ignore_keys: list[str] | Callable | None = None
    save_metrics: bool = False
    save_num_checkpoints_to_keep: int = -1
    autoresume: bool = False
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    fsdp_auto_wrap: bool = True
    device: str | Device | None = None
    precision: str | None = None
    precision_config: dict[str, Any] | None = None
    grad_accum: int | str | None = 1
    device_train_microbatch_size: int | str | None = None
    seed: int | None = None
    deterministic_mode: bool = False
    dist_timeout: float = 1800.0
    ddp_sync_strategy: Any = None
    profiler: Any = None
    python_log_level: str | None = None
    compile_config: dict[str, Any] | None = None
    accumulate_train_batch_on_tokens: bool = False
    lamina_config: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> "Arguments":
        """The arguments of a call, with those that are made of others: DataSpecs, Evaluators, lists and times.

        Errors:
            ConfigError: all that is wrong with them.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = [name for name in given if name not in known]
        problems = [f"{name}: there is no such argument{_hint(name, known)}" for name in unknown]
        arguments = cls(model=given.get("model"), **{n: v for n, v in given.items() if n in known and n != "model"})
        problems += arguments._problems()
        if problems:
            raise ConfigError("\n  ".join(["Trainer: " + problems[0], *problems[1:]]))
        tell_idle_of_trainer(
            given, {field.name: field.default for field in dataclasses.fields(cls)}, arguments.eval_dataloader
        )
        return arguments

    def _problems(self) -> Iterator[str]:
        """Says what is wrong, and puts in the place of each argument what it stands for."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in (*_NEVER, *_NOT_YET):
            value = getattr(self, name)
            if checks.differs(value, defaults[name]) and not (name in _NOT_YET and type(value) is list and not value):
                yield f"{name}: " + (f"there is none here: {_NEVER[name]}" if name in _NEVER else "is not there yet")
        flags = [field.name for field in dataclasses.fields(self) if field.type is bool]
        of_others = {
            "optimizers": lambda _, given: _one_optimizer(given, self.model),
            "schedulers": lambda _, given: require_schedulers(checks.listed(given), [self.optimizers]),
        }
        for name, read in (dict.fromkeys(flags, checks.flag) | _READERS | of_others).items():
            try:
                setattr(self, name, read(name, getattr(self, name)))
            except (ConfigError, TypeError) as error:
                yield str(error) if str(error).startswith((f"{name}=", f"{name}:")) else f"{name}: {error}"
                setattr(self, name, defaults.get(name))
        if self.device_train_microbatch_size is not None and self.grad_accum not in (None, 1):
            yield "grad_accum and device_train_microbatch_size say the same: give one of them"
        if self.autoresume and not (self.save_folder and self.run_name):
            yield "autoresume goes on from the newest checkpoint of save_folder, in a run with a run_name: give both"
        if self.save_weights_only and (self.autoresume or self.save_num_checkpoints_to_keep != -1):
            yield "save_weights_only: autoresume and save_num_checkpoints_to_keep need checkpoints of a whole training"
        if isinstance(self.lamina_config, Mapping) and self.lamina_config.get("microbatches", 1) != 1:
            yield "lamina_config: grad_accum and device_train_microbatch_size say how many microbatches"


def read_for_fit(given: Mapping[str, Any], precision: Any) -> dict[str, Any]:
    """The arguments of a call of `fit`, read as those of a Trainer are, whose precision is this.

    Errors:
        ConfigError: the first that is wrong, or says otherwise than the Trainer.
    """
    read = {name: _OF_FIT[name](name, value) for name, value in given.items() if name in _OF_FIT}
    if given["precision"] is not None and ensure_precision(given["precision"]) is not precision:
        own = f"the Trainer has {precision.value}, for all calls: say it there"
        raise ConfigError(f"fit: precision={given['precision']!r}, but {own}")
    for name, default in (("scale_schedule_ratio", 1.0), ("spin_dataloaders", True)):
        if checks.differs(given[name], default):
            raise ConfigError(f"fit: {name}={given[name]!r}: there is none here: {_NEVER[name]}")
    if None not in (given["grad_accum"], given["device_train_microbatch_size"]):
        raise ConfigError("fit: grad_accum and device_train_microbatch_size say the same: give one of them")
    return read


def require_alike(given: dict[str, Any]) -> None:
    """UsageError where ranks have given a Trainer different arguments, with the values."""
    alike = {name: given.get(name) for name in _ALIKE}
    texts = {name: str(value) if isinstance(value, Time) else value for name, value in alike.items()}
    evaluators = ", ".join(each.label for each in ensure_evaluators(given.get("eval_dataloader")))
    require_same(current.session(), "world", "Trainer", "trainer-alike", **texts, evaluators=evaluators)


def signature() -> inspect.Signature:
    """The signature of a Trainer."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = inspect.signature(Arguments).parameters.values()
    return inspect.Signature([own, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in named)])


def duration(name: str, given: Any) -> Time | None:
    """How far a training goes, by the argument of that name.

    Errors:
        ConfigError: no time, or nothing of one.
    """
    units = [unit for unit in TimeUnit if unit is not TimeUnit.DURATION]
    return None if given is None else named_time(name, given, True, units)


def pieces(name: str, given: Any) -> int | str | None:
    """A number of microbatches or of samples in one, or "auto".

    Errors:
        ConfigError: it is none.
    """
    is_word = given is None or (isinstance(given, str) and given == "auto")
    if not is_word and (type(given) is not int or given < 1):
        raise ConfigError(f"{name}={given!r}: it is a number, 1 or more, or 'auto'")
    return given


def number_of_pieces(name: str, given: Any) -> int | str | None:
    """The number of microbatches of a batch; see `pieces`."""
    if isinstance(pieces(name, given), int) and given > _MOST_PIECES:
        raise checks.wrong(name, given, f"the number of microbatches of a batch, {_MOST_PIECES} at most")
    return given


def _hint(name: str, known: Iterable[str]) -> str:
    found = nearest(name, known, 0.6)
    return f"; the nearest is {found}" if found else ""


def _all_of(kind: type, given: Any) -> list[Any]:
    several = checks.listed(given)
    if wrong := [type(each).__name__ for each in several if not isinstance(each, kind)]:
        raise ConfigError(f"they are objects of {kind.__name__}, and not of {', '.join(wrong)}")
    return several


def _one_optimizer(given: Any, model: Any) -> Any:
    several = checks.listed(given)
    if len(several) > 1 or not all(isinstance(each, torch.optim.Optimizer) for each in several):
        kinds = ", ".join(type(each).__name__ for each in several)
        raise ConfigError(f"it is one optimizer of torch's or of lamina's, not {kinds}")
    if not several or not isinstance(model, torch.nn.Module) or hasattr(several[0], "optimizer"):
        return several[0] if several else None  # one of the Trainer before gets its parameters back when that one ends
    own = set(map(id, model.parameters()))
    if any(id(parameter) not in own for group in several[0].param_groups for parameter in group["params"]):
        raise ConfigError("its parameters are not the model's: make it of model.parameters()")
    return several[0]


def _path(name: str, given: Any) -> str:
    path = checks.path(name, given)
    is_saving = current.is_initialized()  # perhaps there, by the Trainer before
    if not is_saving and not found_checkpoint(path).is_dir():
        raise checks.wrong(name, path, "a checkpoint that a Trainer has saved, or their folder: it is not there")
    return path


def _run_name(name: str, given: Any) -> str:
    """The name of a run, which paths of its files have as a part: it leads out of no folder."""
    found = given if given == "" else checks.text(name, given)
    if found.startswith("/") or ".." in found.split("/") or not found.isprintable():
        raise checks.wrong(name, given, "a part of paths: of printable characters, without a / at its front and any ..")
    return found


def _interval(name: str, given: Any) -> Time:
    return named_time(name, given, True, EPOCH_OR_BATCH)


def _log_level(name: str, given: Any) -> str:
    if not isinstance(logging.getLevelName(str(given).upper()), int):
        raise checks.wrong(name, given, "a level of Python's logging, such as 'info'")
    return given


def _mapping(name: str, given: Any) -> Mapping:
    if not isinstance(given, Mapping):
        raise checks.wrong(name, given, "a dictionary with keys of lamina.init")
    return given


def _seconds(name: str, given: Any) -> float:
    if not checks.number(name, given) > 0:
        raise checks.wrong(name, given, "a number of seconds")
    return float(given)


def _optional(read: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, given: None if given is None else read(name, given)


# Readers of arguments, called with the name and what was given. Arguments that are True or False have no row.
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "model": lambda _, given: in_place(require_model(given)),
    "train_dataloader": _optional(lambda _, given: ensure_data_spec(given)),
    "train_dataloader_label": checks.text,
    "train_subset_num_batches": checks.count_or_all,
    "max_duration": duration,
    "algorithms": lambda _, given: _all_of(Algorithm, given),
    "callbacks": lambda _, given: _all_of(Callback, given),
    "step_schedulers_every_batch": _optional(checks.flag),
    "loggers": lambda _, given: as_destinations(given),
    "eval_dataloader": lambda _, given: ensure_evaluators(given),
    "eval_interval": lambda _, given: given if type(given) is int and given == 1 else ensure_when(given),
    "eval_subset_num_batches": checks.count_or_all,
    "run_name": _optional(_run_name),
    "console_stream": lambda _, given: text_stream(given),
    "console_log_interval": _interval,
    "save_filename": checks.text,
    "save_interval": lambda name, given: given if callable(given) else _interval(name, given),
    "save_num_checkpoints_to_keep": lambda name, given: (
        given if type(given) is int and not given else checks.count_or_all(name, given)
    ),
    "python_log_level": _optional(_log_level),
    "load_path": _optional(_path),
    "save_folder": _optional(checks.path),
    "save_latest_filename": _optional(checks.text),
    "device": lambda _, given: get_device(given),
    "grad_accum": number_of_pieces,
    "device_train_microbatch_size": pieces,
    "seed": _optional(lambda _, given: require_seed(given)),
    "dist_timeout": _seconds,
    "lamina_config": _optional(_mapping),
}
_OF_FIT = {
    **_READERS,
    "train_subset_num_batches": _optional(checks.count_or_all),
    "duration": duration,
    "reset_time": checks.flag,
}
