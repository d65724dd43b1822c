# SPDX-License-Identifier: Apache-2.0
"""The Trainer's `fsdp_config`."""

from collections.abc import Mapping
from typing import Any

from lamina.trainer.configuration_keys import absent, dtype, flag, number, one_of, read
from lamina.trainer.precision import Precision
from lamina.trainer.settings import Settings, keys_of_dtypes

_PREFETCH = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NONE": "none"}
_MIXED = one_of("FULL", "DEFAULT", "PURE")
_KEYS = {
    "sharding_strategy": (one_of("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), "FULL_SHARD"),
    "min_params": (number(0), 1e8),
    "cpu_offload": (absent("parameters in the memory of the host are not there yet"), None),
    "mixed_precision": (lambda given: given if isinstance(given, Mapping) else _MIXED(given), "DEFAULT"),
    "backward_prefetch": (one_of(*_PREFETCH), "BACKWARD_POST"),
    "activation_checkpointing": (flag, False),
    "activation_cpu_offload": (flag, False),
    "verbose": (flag, False),
}
_DTYPES = {f"{name}_dtype": (dtype, None) for name in ("param", "reduce", "buffer")}


def read_fsdp(config: Any, precision: Precision, problems: list[str]) -> Settings:
    """Settings that it asks for: `{}` is all defaults; strings in any case, numbers as text, too."""
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
    )
