# SPDX-License-Identifier: Apache-2.0
"""A training as scripts written for Composer see it."""

from typing import Any

from lamina.composer.composers_names import OF_STATE, Elsewhere
from lamina.composer.metric_names import MetricsByName
from lamina.trainer.training_state import TrainingState


class State(TrainingState, Elsewhere):
    """A training as callbacks and algorithms see it, and may change it.

    Args:
        model: that is trained.
        run_name: of the training.
        seed: of all random numbers; rank 0 draws one if it is None.

    Attributes:
        device: where it runs.
        precision: the numbers of a forward and its loss.
        fsdp_config, deepspeed_config: as the Trainer was given them.
    """

    rank_zero_seed = property(lambda self: self.seed)
    previous_timestamp = property(lambda self: self.timestamp_before)
    fsdp_enabled = property(lambda self: self.fsdp_config is not None)
    deepspeed_enabled = property(lambda self: self.deepspeed_config is not None)
    is_model_ddp = False  # torch's
    profiler = None
    _elsewhere = OF_STATE

    def __init__(self, model: Any, run_name: str, seed: int | None):
        super().__init__(model, run_name, seed)
        self.train_metric_values: dict[str, Any] = MetricsByName()
        self.eval_metric_values: dict[str, Any] = MetricsByName()
        self.fsdp_config: Any = None
        self.deepspeed_config: Any = None
        self.device: Any = None
        self.precision = "fp32"

    @property
    def using_device_microbatch_size(self) -> bool:
        """Tells whether microbatches have a size; else they have a number, `grad_accum`."""
        return self.device_train_microbatch_size is not None

    def batch_get_item(self, key: Any) -> Any:
        """The part of the batch that a key names: an index, a name, a function of the batch, or a pair of that and of
        one that returns the batch with another part."""
        get = key[0] if isinstance(key, tuple) and callable(key[0]) else key
        return get(self.batch) if callable(get) else self.batch[get]

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Puts another part into the batch, by such a key; a tuple becomes another one."""
        if isinstance(key, tuple) and callable(key[1]):
            self.batch = key[1](self.batch, value)
        elif isinstance(self.batch, tuple):
            parts = [value if at == key % len(self.batch) else part for at, part in enumerate(self.batch)]
            self.batch = type(self.batch)(*parts) if hasattr(self.batch, "_fields") else tuple(parts)
        else:
            self.batch[key] = value
