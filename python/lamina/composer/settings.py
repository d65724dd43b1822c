# SPDX-License-Identifier: Apache-2.0
"""Settings of a training, as its configurations ask for them: see [Note: layouts of the Trainer] in
lamina/config/training_settings.h. The engine reads them, and says what is wrong."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lamina import _lamina
from lamina.composer.precision import Precision
from lamina.composer.user_words import in_words, modules_of


@dataclasses.dataclass(frozen=True)
class Given:
    """Arguments of a Trainer beside its configurations.

    Attributes:
        ranks: of the job.
        device_type: "cpu", or an accelerator's.
        batch_size: of a rank's loader, where it says that.
    """

    ranks: int = 1
    device_type: str = "cpu"
    batch_size: int | None = None
    device_train_microbatch_size: int | str | None = None
    grad_accum: int | None = 1


@dataclasses.dataclass
class Settings:
    """Settings of a training, as a configuration asks for them.

    Attributes:
        precision: that of the Trainer.
        autocast: that of forwards and losses; under `deepspeed_config` the model alone is half.
        layout: its name for readers, a sharding strategy or a stage of DeepSpeed's; None: lamina_config alone says it.
        keys: of `lamina.init`.
        grad_scaler: whether losses are scaled by `lamina.amp.GradScaler`.
        optimizer_arguments: arguments of `lamina.DistributedOptimizer`: its loss scale, where the model is half.
        clipping_norm: what the norm of all gradients is clipped to; None: nothing.
        activation_checkpointing: whether the modules that the model chooses are checkpointed.
        min_params: see `units`; None: all modules that are called are units.
        verbose: whether the table of units is printed.
        ignored: modules that stay whole on every rank, with all that is in them.
        unheeded: keys that were given, and that change no result.
    """

    precision: Precision
    autocast: Precision
    layout: str | None
    keys: dict[str, Any]
    grad_scaler: bool
    optimizer_arguments: dict[str, Any]
    clipping_norm: float | None
    activation_checkpointing: bool
    min_params: float | None
    verbose: bool
    ignored: Sequence[nn.Module]
    unheeded: Sequence[str]


def settings(
    fsdp_config: Mapping[str, Any] | None = None,
    deepspeed_config: Mapping[str, Any] | None = None,
    precision: str | Precision | None = None,
    lamina_config: Mapping[str, Any] | None = None,
    given: Given | None = None,
) -> Settings:
    """The settings that arguments of a Trainer ask for; starts nothing.

    Args:
        given: what else the Trainer was given.

    Errors:
        ConfigError: all that is wrong, at once, with nearest names and both numbers of a contradiction.
    """
    words = map(in_words, (fsdp_config, deepspeed_config, precision, lamina_config))
    found = _lamina.training_settings(*words, *dataclasses.astuple(given or Given()))
    own = {} if lamina_config is None else dict(lamina_config)
    keys = own | found.pop("keys")
    used = {name: Precision(found.pop(name)) for name in ("precision", "autocast")}
    ignored = modules_of(None if fsdp_config is None else fsdp_config.get("ignored_modules")) or []
    return Settings(**found, **used, keys=keys, ignored=ignored)
