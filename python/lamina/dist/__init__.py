# SPDX-License-Identifier: Apache-2.0
"""torch.distributed with answers for every script: without a launcher it is a world of one, in which each function does
what it would there; under torchrun, `lamina run`, srun or mpirun it is that world.

    from lamina import dist

    dist.initialize_dist()
    with dist.run_local_rank_zero_first():
        dataset = download()
    loader = DataLoader(dataset, batch_size=8, sampler=dist.get_sampler(dataset, shuffle=True))

All but the ranks and the samplers is collective: every rank calls it, outside step functions. In a world of several
ranks collectives need `initialize_dist`, or any other that makes torch's default process group. A rank that is gone is
a PeerError, one that does not answer in time a TimeoutError.
"""

from lamina.dist.batches import exact_batches, require_distributed_sampler
from lamina.dist.collectives import (
    all_gather,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object_list,
)
from lamina.dist.local_zero import run_local_rank_zero_first
from lamina.dist.ranks import (
    MissingEnvironmentError,
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_world_size,
    is_available,
    is_initialized,
)
from lamina.dist.sampler import ExactSampler, get_sampler
from lamina.dist.signal_files import (
    busy_wait_for_local_rank_zero,
    get_node_signal_file_name,
    local_rank_zero_download_and_wait,
    write_signal_file,
)
from lamina.dist.starting import initialize_dist

__all__ = [
    "ExactSampler",
    "MissingEnvironmentError",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "busy_wait_for_local_rank_zero",
    "exact_batches",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_node_signal_file_name",
    "get_sampler",
    "get_world_size",
    "initialize_dist",
    "is_available",
    "is_initialized",
    "local_rank_zero_download_and_wait",
    "require_distributed_sampler",
    "run_local_rank_zero_first",
    "write_signal_file",
]
