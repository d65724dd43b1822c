# SPDX-License-Identifier: Apache-2.0
"""A rank of two machines with two ranks each, whose local rank 0 on the second machine fails the second time."""

import os
from pathlib import Path

import pytest

import lamina
from lamina import dist

machine, first = dist.get_node_rank(), dist.get_local_rank() == 0
assert (dist.get_global_rank(), dist.get_local_world_size()) == (2 * machine + (not first), 2)
dist.initialize_dist("cpu", timeout=100)
names = [Path(os.environ["DIR"]) / f"machine-{each}" for each in range(2)]
with dist.run_local_rank_zero_first():
    if first:
        names[machine].touch()
    else:
        assert all(name.exists() for name in names)
with pytest.raises(ValueError, match="on machine 1") as caught, dist.run_local_rank_zero_first():
    assert first, "only after a local rank 0 that succeeds"
    if machine == 1:
        raise ValueError("on machine 1")
assert dist.get_global_rank() == 2 or (isinstance(caught.value, lamina.RemoteError) and caught.value.rank == 2)
assert len(set(dist.all_gather_object(dist.get_node_signal_file_name()))) == 2, "one name on each machine"
with dist.busy_wait_for_local_rank_zero(os.environ["DIR"]):
    pass
dist.barrier()
