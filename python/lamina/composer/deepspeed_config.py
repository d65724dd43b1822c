# SPDX-License-Identifier: Apache-2.0
"""The Trainer's `deepspeed_config`."""

from collections.abc import Mapping
from typing import Any

from lamina.composer.configuration_keys import (
    Findings,
    absent,
    dtype,
    flag,
    number,
    only,
    read,
    section,
    unheeded,
    unheeded_as,
)
from lamina.composer.precision import Precision, ensure_precision
from lamina.composer.settings import Given, Settings, keys_of_dtypes

_COUNT = number(1, whole=True), None
_SECTION = section, {}
_UNHEEDED = unheeded, None
_FLAG = unheeded_as(flag), None
_TIME = unheeded_as(number(0)), None  # of elements: says when something travels
_OFFLOAD = absent("states and parameters in the memory of the host are not there yet"), None
_BATCHES = absent("it changes the sizes of batches, which the Trainer's loaders have: leave it out"), None
_MODEL = absent("it changes the model, and is not there: leave it out"), None
_LAYOUT = absent("lamina_config={...} has partitions and slices, keys of lamina.init: leave it out"), None
_QUANTISED = absent("values and gradients travel as communication_data_type says: leave it out"), None
_AVERAGED = "gradients are summed in float32 and divided once, by the number of samples: leave it out"
_KEYS = {
    "train_batch_size": _COUNT,
    "train_micro_batch_size_per_gpu": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "zero_optimization": _SECTION,
    "fp16": _SECTION,
    "bf16": _SECTION,
    "gradient_clipping": (number(0), 0.0),
    "communication_data_type": (dtype, None),
    "optimizer": (absent("the Trainer's argument `optimizers` says which one: leave this out"), None),
    "scheduler": (absent("the Trainer's argument `schedulers` says which one: leave this out"), None),
    "amp": (absent("apex is not there: the Trainer's `precision`, or fp16, says it"), None),
    "torch_autocast": (absent("the Trainer's `precision` says it: leave this out"), None),
    "zero_allow_untested_optimizer": _FLAG,
    "prescale_gradients": (only(False, _AVERAGED), None),
    "gradient_predivide_factor": (only(1.0, _AVERAGED), None),
    "gradient_allreduce_op": (only("mean", _AVERAGED), None),
    "managed_gradient_accumulation": (only(True, "the Trainer's microbatches are the accumulation"), None),
    "fp32_allreduce": (only(False, "communication_data_type says it"), None),
    "data_types": _SECTION,
    "mp_size": (only(1, "lamina_config={...} has partitions and slices, keys of lamina.init"), None),
    **dict.fromkeys(("elasticity", "autotuning", "curriculum_learning", "data_efficiency"), _BATCHES),
    **dict.fromkeys(("progressive_layer_drop", "sparse_attention", "quantize_training"), _MODEL),
    **dict.fromkeys(("compression_training", "eigenvalue", "hybrid_engine", "weight_quantization"), _MODEL),
    **dict.fromkeys(("pipeline", "tensor_parallel", "expert_parallel", "sequence_parallel_size"), _LAYOUT),
    **dict.fromkeys(
        (
            *("steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "log_level"),
            *("tensorboard", "wandb", "csv_monitor", "comet", "monitor_config"),
            *("comms_logger", "flops_profiler", "aio", "nebula", "compile", "graph_harvesting"),
            *("disable_allgather", "sparse_gradients", "zero_force_ds_cpu_optimizer", "dataloader_drop_last"),
            *("activation_checkpointing", "checkpoint", "load_universal_checkpoint", "vocabulary_size"),
            *("use_data_before_expert_parallelism", "seq_parallel_communication_data_type"),
        ),
        _UNHEEDED,
    ),
}
_STAGE3 = {
    "prefetch_bucket_size": _TIME,
    "max_reuse_distance": _TIME,
    "model_persistence_threshold": _TIME,
    "max_live_parameters": _COUNT,
    "param_persistence_threshold": (number(0, whole=True), None),
    "gather_16bit_weights_on_model_save": _FLAG,  # state dicts are always whole
    "gather_fp16_weights_on_model_save": _FLAG,
    "module_granularity_threshold": _UNHEEDED,
    "use_all_reduce_for_fetch_params": _UNHEEDED,
    "allgather_sequential": _UNHEEDED,
}
_ZERO = {
    "stage": (number(0, 3, whole=True), 0),
    "reduce_bucket_size": _COUNT,
    **dict.fromkeys(("allgather_bucket_size", "sub_group_size"), _TIME),
    **dict.fromkeys(("overlap_comm", "reduce_scatter", "allgather_partitions"), _FLAG),
    **dict.fromkeys(("contiguous_gradients", "round_robin_gradients"), _FLAG),
    **{f"stage3_{name}": entry for name, entry in _STAGE3.items()},
    **dict.fromkeys(("offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_params"), _OFFLOAD),
    **dict.fromkeys(("cpu_offload_param", "zenflow"), _OFFLOAD),
    **dict.fromkeys(("zero_quantized_weights", "zero_quantized_gradients"), _QUANTISED),
    **dict.fromkeys(("zero_quantized_nontrainable_weights", "zeropp_loco_param"), _QUANTISED),
    **dict.fromkeys(
        (
            *("use_multi_rank_bucket_allreduce", "grad_hooks"),
            *("load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint", "legacy_stage1"),
            *("ignore_unused_parameters", "override_module_apply", "log_trace_cache_warnings", "leaf_module"),
            *("enable_sanity_checks", "memory_efficient_linear", "cpu_offload_use_pin_memory"),
            *("zero_hpz_partition_size", "mics_shard_size", "mics_hierarchical_params_gather"),
            "save_muon_momentum_buffer_in_memory",
        ),
        _UNHEEDED,
    ),
}
_MASTERS = absent("masters are float32"), None
_HALF = {"enabled": (flag, False)}
_BF16 = _HALF | {
    **dict.fromkeys(("immediate_grad_update", "check_grad_overflow", "check_overflow"), _UNHEEDED),
    **dict.fromkeys(("bf16_master_weights_and_grads", "bf16_optimizer_states"), _MASTERS),
}
_FP16 = _HALF | {
    "loss_scale": (number(0), 0.0),
    "initial_scale_power": (number(0, 127, whole=True), 16),
    "loss_scale_window": (number(1, whole=True), 1000),
    "hysteresis": (number(1, whole=True), 2),
    "consecutive_hysteresis": (flag, False),
    "min_loss_scale": (number(2.0**-126), 1.0),
    "auto_cast": _FLAG,  # floating-point arguments are always converted
    "fp16_master_weights_and_grads": _MASTERS,
}
_DATA_TYPES = {
    name: (only("fp32", "gradients add up in float32, and parameters and buffers are as the precision says"), None)
    for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype")
}
# Keys of `init`, and the first stage in which they say something.
_OF_INIT = {
    "reduce_bucket_size": (2, "sdp_reduce_bucket_size"),
    "stage3_max_live_parameters": (3, "sdp_max_live_parameters"),
    "stage3_param_persistence_threshold": (3, "sdp_param_persistence_threshold"),
}


def read_deepspeed(
    config: Any, precision: Precision | None, given: Given, readers: int, problems: Findings
) -> Settings:
    """Settings that it asks for: `{}` is stage 0, no clipping, and the Trainer's precision.

    Args:
        precision: the Trainer's argument; None where it was not given.
        readers: the number of loaders that read different data.
    """
    config = _renamed(config, {"bfloat16": "bf16"})
    values = read("deepspeed_config", config, _KEYS, problems)
    of_zero = _renamed(values["zero_optimization"], {name: f"stage3_{name}" for name in _STAGE3})
    zero = read("deepspeed_config['zero_optimization']", of_zero, _ZERO, problems)
    read("deepspeed_config['data_types']", values["data_types"], _DATA_TYPES, problems)
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


def _renamed(config: Any, other: Mapping[str, str]) -> Any:
    """Gives a configuration the names that keys have here."""
    return {other.get(key, key): value for key, value in config.items()} if isinstance(config, Mapping) else config


def _precision(
    argument: Precision | None, on: list[Precision], off: dict[Precision, str], given: Given, problems: Findings
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


def _check_batches(values: Mapping[str, Any], given: Given, readers: int, problems: Findings) -> None:
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
