# SPDX-License-Identifier: Apache-2.0
"""The Trainer's `deepspeed_config`."""

from collections.abc import Mapping
from typing import Any

from lamina.trainer.configuration_keys import absent, dtype, flag, number, read, section
from lamina.trainer.precision import Precision, ensure_precision
from lamina.trainer.settings import Given, Settings, keys_of_dtypes

_COUNT = number(1, whole=True), None
_TIME = number(0), None  # of elements: says when something travels, and changes no result
_FLAG = flag, None
_OFFLOAD = absent("states and parameters in the memory of the host are not there yet"), None
_KEYS = {
    "train_batch_size": _COUNT,
    "train_micro_batch_size_per_gpu": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "zero_optimization": (section, {}),
    "fp16": (section, {}),
    "bf16": (section, {}),
    "gradient_clipping": (number(0), 0.0),
    "communication_data_type": (dtype, None),
    "zero_allow_untested_optimizer": _FLAG,
    "optimizer": (absent("the Trainer's argument `optimizers` says which one: leave this out"), None),
    "scheduler": (absent("the Trainer's argument `schedulers` says which one: leave this out"), None),
    "amp": (absent("apex is not there: the Trainer's `precision`, or fp16, says it"), None),
}
_ZERO = {
    "stage": (number(0, 3, whole=True), 0),
    "reduce_bucket_size": _COUNT,
    "allgather_bucket_size": _TIME,
    "sub_group_size": _TIME,
    "overlap_comm": _FLAG,
    "reduce_scatter": _FLAG,
    "allgather_partitions": _FLAG,
    "contiguous_gradients": _FLAG,
    "round_robin_gradients": _FLAG,
    "stage3_prefetch_bucket_size": _TIME,
    "stage3_max_reuse_distance": _TIME,
    "stage3_model_persistence_threshold": _TIME,
    "stage3_max_live_parameters": _COUNT,
    "stage3_param_persistence_threshold": (number(0, whole=True), None),
    "stage3_gather_16bit_weights_on_model_save": _FLAG,  # state dicts are always whole
    "stage3_gather_fp16_weights_on_model_save": _FLAG,
    "offload_param": _OFFLOAD,
    "offload_optimizer": _OFFLOAD,
    "cpu_offload": _OFFLOAD,
}
_BF16 = {"enabled": (flag, False)}
_FP16 = _BF16 | {
    "loss_scale": (number(0), 0.0),
    "initial_scale_power": (number(0, 127, whole=True), 16),
    "loss_scale_window": (number(1, whole=True), 1000),
    "hysteresis": (number(1, whole=True), 2),
    "consecutive_hysteresis": (flag, False),
    "min_loss_scale": (number(2.0**-126), 1.0),
    "auto_cast": _FLAG,  # floating-point arguments are always converted
    "fp16_master_weights_and_grads": (absent("masters are float32"), None),
}
# Keys of `init`, and the first stage in which they say something.
_OF_INIT = {
    "reduce_bucket_size": (2, "sdp_reduce_bucket_size"),
    "stage3_max_live_parameters": (3, "sdp_max_live_parameters"),
    "stage3_param_persistence_threshold": (3, "sdp_param_persistence_threshold"),
}


def read_deepspeed(
    config: Any, precision: Precision | None, given: Given, readers: int, problems: list[str]
) -> Settings:
    """Settings that it asks for: `{}` is stage 0, no clipping, and the Trainer's precision.

    Args:
        precision: the Trainer's argument; None where it was not given.
        readers: the number of loaders that read different data.
    """
    values = read("deepspeed_config", config, _KEYS, problems)
    zero = read("deepspeed_config['zero_optimization']", values["zero_optimization"], _ZERO, problems)
    fp16 = read("deepspeed_config['fp16']", values["fp16"], _FP16, problems)
    bf16 = read("deepspeed_config['bf16']", values["bf16"], _BF16, problems)
    _check_batches(values, given, readers, problems)
    sections = {Precision.AMP_FP16: ("fp16", fp16), Precision.AMP_BF16: ("bf16", bf16)}
    on = [each for each, (_, values_of) in sections.items() if values_of["enabled"]]
    there = config if isinstance(config, Mapping) else {}
    off = {each: name for each, (name, _) in sections.items() if each not in on and name in there}
    found = _precision(precision, on, off, given, problems)
    half = None if found is Precision.FP32 else found.dtype
    stage, norm = zero["stage"], values["gradient_clipping"] or None
    keys = keys_of_dtypes(half, values["communication_data_type"] or half, half)
    keys |= {name: zero[key] for key, (least, name) in _OF_INIT.items() if stage >= least and zero[key] is not None}
    if norm is not None:
        keys["sdp_gradient_clipping"] = None
    return Settings(
        precision=found,
        autocast=Precision.FP32,
        layout=f"stage {stage}",
        keys=keys,
        loss_scale=_loss_scale(fp16),
        clipping_norm=norm,
    )


def _precision(
    argument: Precision | None, on: list[Precision], off: dict[Precision, str], given: Given, problems: list[str]
) -> Precision:
    if len(on) > 1:
        problems.append("deepspeed_config has fp16 and bf16, both enabled; expected one of them")
    if argument is None:
        default = ensure_precision(None, given.device_type)
        return on[0] if on else Precision.FP32 if default in off else default
    if argument in off or (on and argument not in on):
        says = f"has {on[0].value} enabled" if on else f"has {off[argument]}, which is not enabled"
        problems.append(f"deepspeed_config {says}, but the Trainer has precision={argument.value!r}")
    return argument


def _loss_scale(fp16: Mapping[str, Any]) -> dict[str, Any]:
    if fp16["loss_scale"]:
        return {"static_loss_scale": fp16["loss_scale"]}
    args = {
        "init_scale": 2.0 ** fp16["initial_scale_power"],
        "scale_window": fp16["loss_scale_window"],
        "min_scale": fp16["min_loss_scale"],
        "delayed_shift": fp16["hysteresis"],
        "consecutive_hysteresis": fp16["consecutive_hysteresis"],
    }
    return {"dynamic_loss_scale": True, "dynamic_loss_args": args}


def _check_batches(values: Mapping[str, Any], given: Given, readers: int, problems: list[str]) -> None:
    """Compares the sizes of batches and their number with the loader's and the Trainer's."""
    size, micro = given.batch_size, given.device_train_microbatch_size
    pieces = (given.grad_accum or 1) if micro is None else None
    if isinstance(micro, int) and size is not None:
        micro, pieces = min(micro, size), -(-size // micro)
    elif micro is None and size is not None:
        micro = size / pieces
    expected = {
        "train_batch_size": None if size is None else size * readers,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": pieces,
    }
    for key, number_here in expected.items():
        if values[key] is None or values[key] == number_here:
            continue
        here = f"{number_here:.10g}" if isinstance(number_here, int | float) else number_here or "none"
        problems.append(
            f"deepspeed_config[{key!r}]: {values[key]}, but the Trainer has {here}: {readers} x {size} samples, "
            f"device_train_microbatch_size={given.device_train_microbatch_size}, grad_accum={given.grad_accum}"
        )
