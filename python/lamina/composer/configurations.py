# SPDX-License-Identifier: Apache-2.0
"""Configurations of the Trainer become keys of `lamina.init`.

[Note: layouts of the Trainer] `fsdp_config` and `deepspeed_config` choose a layout, a row of the table in
docs/trainer.md, and the loop knows nothing of it. How long values are kept is said by `sdp_reshard_after_forward` and
`sdp_reshard_after_backward`. Where ranks share memory, values lie there once for all, and rows that shard take the same
bytes.
"""

from collections.abc import Mapping
from typing import Any

from lamina.composer.configuration_keys import Findings, raise_problems
from lamina.composer.deepspeed_config import read_deepspeed
from lamina.composer.fsdp_config import read_fsdp
from lamina.composer.precision import Precision, ensure_precision
from lamina.composer.settings import Given, Settings
from lamina.errors import ConfigError

# Keys of a layout that shards. `lamina_config` may have others: a smaller degree, parameters that stay whole.
_SHARDED = {
    "sdp_param_persistence_threshold": 0,
    "sdp_gradient_clipping": None,
}
_WHOLE = {"sharded_data_parallel_degree": 1, "shard_optimizer_state": False}
_FREED = {"sdp_reshard_after_forward": True, "sdp_reshard_after_backward": True}
_LAYOUTS = {
    "FULL_SHARD": _FREED,
    "stage 3": _FREED,
    "SHARD_GRAD_OP": _FREED | {"sdp_reshard_after_forward": False},
    "stage 2": dict.fromkeys(_FREED, False),
    "stage 1": _WHOLE | {"shard_optimizer_state": True},
    "NO_SHARD": _WHOLE,
    "stage 0": _WHOLE,
}


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
    given, problems = given or Given(), Findings()
    own = dict(lamina_config) if isinstance(lamina_config, Mapping) else {}
    if not isinstance(lamina_config, Mapping | None):
        problems.append(f"lamina_config: {lamina_config!r} is not allowed; expected a dictionary")
    holders, readers = _copies(given.ranks, own)
    argument = found = None
    try:
        found = ensure_precision(precision, given.device_type)
        argument = None if precision is None else found
    except ConfigError as error:
        problems.append(str(error))
    found = found or Precision.FP32
    wanted = Settings(found, found)
    if fsdp_config is not None:
        wanted = read_fsdp(fsdp_config, found, problems)
    if deepspeed_config is not None:
        wanted = read_deepspeed(deepspeed_config, argument, given, readers, problems)
        if fsdp_config is not None:
            problems.append("fsdp_config and deepspeed_config are both given; expected one of them")
    wanted.keys = own if wanted.layout is None else _keys(wanted, own, holders, problems)
    raise_problems(problems)
    wanted.unheeded = problems.unheeded
    return wanted


def _copies(ranks: int, own: Mapping[str, Any]) -> tuple[int, int]:
    """Among how many ranks a parameter may be sharded, and how many loaders read different data."""

    def degree(*names: str) -> int:
        return next((own[name] for name in names if type(own.get(name)) is int and 1 <= own[name] <= ranks), 1)

    copies = ranks // degree("partitions", "pipeline_parallel_degree")
    slices = degree("tensor_parallel_degree")
    return copies // slices, copies // slices if own.get("prescaled_batch") is True else copies


def _keys(wanted: Settings, own: Mapping[str, Any], holders: int, problems: list[str]) -> dict[str, Any]:
    """The keys of `init`: what the configuration says, and lamina_config where that does not contradict it."""
    is_sharded = _LAYOUTS[wanted.layout].keys() == _FREED.keys()
    layout = {"sharded_data_parallel_degree": holders, **_SHARDED} if is_sharded else {}
    needed = {"ddp": True, **_LAYOUTS[wanted.layout], **wanted.keys}
    for key, value in needed.items():
        if own.get(key, value) != value:
            problems.append(
                f"lamina_config[{key!r}]: {own[key]!r}, but {wanted.layout} with precision {wanted.precision.value} "
                f"makes it {value!r}"
            )
    if is_sharded and holders > 1 and own.get("sharded_data_parallel_degree") == 1:
        problems.append(
            f"lamina_config['sharded_data_parallel_degree']: 1, but {wanted.layout} shards over more of the {holders} "
            "copies of the model"
        )
    return layout | dict(own) | needed
