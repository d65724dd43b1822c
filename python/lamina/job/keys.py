# SPDX-License-Identifier: Apache-2.0
"""The keys of `lamina.init`, for type checkers and editors. docs/configuration.md says what they mean."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict


class LayoutKeys(TypedDict, total=False):
    """Lists what `change` takes by keywords."""

    partitions: int
    pipeline_parallel_degree: int
    microbatches: int
    schedule: Literal["simple", "interleaved", "_only_forward"]
    pipeline: Literal["simple", "interleaved", "_only_forward"]
    active_microbatches: int | None
    placement_strategy: str
    auto_partition: bool
    default_partition: int | None
    optimize: Literal["memory", "speed"]
    memory_weight: float | None
    sharded_data_parallel_degree: int
    sdp_param_persistence_threshold: int
    sdp_persistent_parameters: list[str] | None
    sdp_units: list[str] | None
    shard_optimizer_state: bool
    tensor_parallel_degree: int


class Keys(TypedDict, total=False):
    """Lists what `init` takes by keywords. Every key may be left out."""

    enabled: bool
    parameters: Mapping[str, Any]
    partitions: int
    pipeline_parallel_degree: int
    microbatches: int
    schedule: Literal["simple", "interleaved", "zero_bubble", "_only_forward"]
    pipeline: Literal["simple", "interleaved", "zero_bubble", "_only_forward"]
    active_microbatches: int | None
    deterministic_server: bool
    placement_strategy: str
    auto_partition: bool
    default_partition: int | None
    optimize: Literal["memory", "speed"]
    memory_weight: float | None
    skip_tracing: bool
    load_partition: bool
    partition_file: str | None
    contiguous: bool
    ddp: bool
    ddp_port: int | None
    ddp_dist_backend: Literal["auto", "nccl"] | None
    horovod: bool
    tensor_parallel_degree: int
    prescaled_batch: bool
    fp16: bool
    bf16: bool
    fp16_params: bool
    buffer_dtype: Literal["fp32", "fp16", "bf16", "own"] | None
    reduce_dtype: Literal["fp32", "fp16", "bf16"] | None
    shard_optimizer_state: bool
    offload_activations: bool
    activation_loading_horizon: int
    sharded_data_parallel_degree: int
    sdp_reduce_bucket_size: int
    sdp_param_persistence_threshold: int
    sdp_max_live_parameters: int
    sdp_reshard_after_forward: bool
    sdp_reshard_after_backward: bool
    sdp_backward_prefetch: Literal["pre", "post", "none"]
    sdp_persistent_parameters: list[str] | None
    sdp_units: list[str] | None
    sdp_hierarchical_allgather: bool
    sdp_gradient_clipping: float | None
    xla: bool
    fork: bool
    device: str
    timeout_s: float
    silent_s: float | None
    seed: int | None
    verify_steps: int
    prove_slices: bool
