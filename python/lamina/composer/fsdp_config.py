# SPDX-License-Identifier: Apache-2.0
"""The Trainer's `fsdp_config`."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lamina.composer.configuration_keys import UNHEEDED, Findings, absent, dtype, flag, number, one_of, read, unheeded
from lamina.composer.precision import Precision
from lamina.composer.settings import Settings, keys_of_dtypes

_PREFETCH = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NONE": "none"}
_MIXED = one_of("FULL", "DEFAULT", "PURE")
_CHECKPOINTS = "checkpoints are lamina's, which load in any layout: leave it out"
_DEGREE = 'lamina_config={"sharded_data_parallel_degree": n} shards over n ranks: leave it out'


def _modules(value: Any) -> list[nn.Module]:
    found = [] if value is None else [value] if isinstance(value, nn.Module) else value
    if isinstance(found, str) or not all(isinstance(each, nn.Module) for each in found):
        raise ValueError(f"{value!r} is not allowed; expected modules of the model")
    return list(found)


# Later versions of Composer, and torch, have keys that the first ones do not.
_KEYS = {
    "sharding_strategy": (one_of("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), "FULL_SHARD"),
    "min_params": (number(0), 1e8),
    "cpu_offload": (absent("parameters in the memory of the host are not there yet"), None),
    "mixed_precision": (lambda given: given if isinstance(given, Mapping) else _MIXED(given), "DEFAULT"),
    "backward_prefetch": (one_of(*_PREFETCH), "BACKWARD_POST"),
    "activation_checkpointing": (flag, False),
    "activation_cpu_offload": (flag, False),
    "verbose": (flag, False),
    "sync_module_states": (lambda given: None if flag(given) else UNHEEDED, None),  # all get rank 0's values
    "ignored_modules": (_modules, ()),
    "keep_low_precision_grads": (absent("masters, and their gradients, are float32"), None),
    "te_shard_fp8_weight": (absent("fp8 is not there"), None),
    "load_planner": (absent(_CHECKPOINTS), None),
    "save_planner": (absent(_CHECKPOINTS), None),
    "device_mesh": (absent(_DEGREE), None),
    "process_group": (absent(_DEGREE), None),
    "data_parallel_shard_degree": (absent(_DEGREE), None),
    "data_parallel_replicate_degree": (absent(_DEGREE), None),
    **dict.fromkeys(
        (
            *("limit_all_gathers", "forward_prefetch", "forward_prefetch_limit", "backward_prefetch_limit"),
            *("use_orig_params", "flatten_parameters", "activation_checkpointing_reentrant", "te_checkpoint_wrapper"),
            *("state_dict_type", "load_fsdp_monolith_rank0_only", "load_monolith_rank0_only"),
            *("sharded_ckpt_prefix_dir", "auto_wrap"),
        ),
        (unheeded, None),
    ),
}
_DTYPES = {f"{name}_dtype": (dtype, None) for name in ("param", "reduce", "buffer")}


def read_fsdp(config: Any, precision: Precision, problems: Findings) -> Settings:
    """Settings that it asks for: `{}` is all defaults; strings in any case, numbers as text, too.

    Args:
        config: a dictionary.
        precision: the Trainer's.
        problems: gets what is wrong.
    """
    values = read("fsdp_config", config, _KEYS, problems)
    mixed, half = values["mixed_precision"], precision.dtype
    if isinstance(mixed, Mapping):
        dtypes = read("fsdp_config['mixed_precision']", mixed, _DTYPES, problems)
    else:
        of_name = {"FULL": (None, None, None), "DEFAULT": (None, half, None), "PURE": (half, half, half)}
        dtypes = dict(zip(_DTYPES, of_name[mixed], strict=True))
    keys = keys_of_dtypes(*dtypes.values())
    if values["sharding_strategy"] != "NO_SHARD":
        keys["sdp_backward_prefetch"] = _PREFETCH[values["backward_prefetch"]]
    if values["activation_cpu_offload"]:
        keys["offload_activations"] = True
        if not values["activation_checkpointing"]:
            problems.append(
                "fsdp_config['activation_cpu_offload']: of modules that are not checkpointed it is not there yet; "
                "expected it with activation_checkpointing"
            )
    return Settings(
        precision=precision,
        autocast=precision,
        layout=values["sharding_strategy"],
        keys=keys,
        activation_checkpointing=values["activation_checkpointing"],
        min_params=values["min_params"],
        verbose=values["verbose"],
        ignored=values["ignored_modules"],
    )
