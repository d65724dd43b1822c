# SPDX-License-Identifier: Apache-2.0
"""Arguments that have no effect beside the others: each is told, and none is refused."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lamina.composer.evaluator import Evaluator
from lamina.dist.ranks import get_global_rank
from lamina.trainer import checks
from lamina.util.told import tell

# Arguments of the Trainer, by the one that they are of.
_OF_TRAINER = {
    "save_folder": (
        *("save_filename", "save_latest_filename", "save_overwrite", "save_interval", "save_weights_only"),
        "save_num_checkpoints_to_keep",
    ),
    "load_path": ("load_weights_only", "load_strict_model_weights"),
    "train_dataloader": ("train_dataloader_label",),
    "eval_dataloader": ("eval_interval", "eval_subset_num_batches"),
    "schedulers": ("step_schedulers_every_batch",),
    "log_to_console": ("console_log_interval",),
}
_OF_FIT = {
    "train_dataloader": ("train_dataloader_label",),
    "eval_dataloader": ("eval_interval", "eval_subset_num_batches"),
    "schedulers": ("step_schedulers_every_batch",),
}
_OF_EACH = {"eval_interval": "eval_interval", "eval_subset_num_batches": "subset_num_batches"}  # evaluator
_KEYS = {"seed": "seed", "dist_timeout": "timeout_s"}  # of lamina_config, that say the same


def tell_idle_of_trainer(given: Mapping[str, Any], defaults: Mapping[str, Any], evaluators: list[Evaluator]) -> None:
    """Says what was given to a Trainer and has no effect; world rank 0 does.

    Args:
        given: the arguments of the call.
        defaults: of all arguments.
        evaluators: those that are given.
    """
    _tell("Trainer", [*_idle(given, defaults, _OF_TRAINER), *_overruled(given, defaults, evaluators)])


def tell_idle_of_fit(given: Mapping[str, Any], defaults: Mapping[str, Any], evaluators: list[Evaluator]) -> None:
    """Says what was given to `fit` and has no effect; world rank 0 does.

    Args:
        given: the arguments of the call.
        defaults: of all arguments.
        evaluators: those that are given.
    """
    _tell("fit", [*_idle(given, defaults, _OF_FIT), *_of_evaluators(given, defaults, evaluators)])


def _tell(where: str, lines: Iterable[str]) -> None:
    for line in lines if get_global_rank() == 0 else ():
        tell(f"{where}: {line}")


def _idle(given: Mapping[str, Any], defaults: Mapping[str, Any], of: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for needed, names in of.items():
        idle = [name for name in names if _is_given(name, given, defaults)]
        if idle and not _is_there(given.get(needed, defaults.get(needed))):
            yield f"{' and '.join(idle)}: no effect without {needed}"


def _overruled(given: Mapping[str, Any], defaults: Mapping[str, Any], evaluators: list[Evaluator]) -> Iterator[str]:
    yield from _of_evaluators(given, defaults, evaluators)
    if (
        given.get("save_folder")
        and given.get("save_latest_filename")
        and _is_given("save_latest_filename", given, defaults)
    ):
        yield "save_latest_filename: no effect: load_path=save_folder goes on from the newest checkpoint"
    bar = given.get("progress_bar", defaults["progress_bar"])
    if _is_given("console_stream", given, defaults) and not bar and not given.get("log_to_console"):
        yield "console_stream: no effect without log_to_console and progress_bar"
    if given.get("auto_log_hparams") and not given.get("loggers") and not given.get("log_to_console"):
        yield "auto_log_hparams: no effect without loggers and log_to_console"
    keys = given.get("lamina_config") or {}
    for name, key in _KEYS.items():
        if _is_given(name, given, defaults) and key in keys and given[name] != keys[key]:
            yield f"{name}={given[name]}: no effect, for lamina_config says {key}: {keys[key]}"


def _of_evaluators(given: Mapping[str, Any], defaults: Mapping[str, Any], evaluators: list[Evaluator]) -> Iterator[str]:
    for name, own in _OF_EACH.items():
        if (
            evaluators
            and _is_given(name, given, defaults)
            and all(getattr(each, own) is not None for each in evaluators)
        ):
            yield f"{name}: no effect, for each Evaluator has a {own} of its own"


def _is_given(name: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Tells whether it says something else than what holds without it."""
    return name in given and checks.differs(given[name], defaults[name])


def _is_there(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, (list, tuple)) and not value)
