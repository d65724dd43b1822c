# SPDX-License-Identifier: Apache-2.0
"""Cases of a training that goes on in another layout, for three and for four ranks."""

import copy
import os

import torch
from multiprocess.resuming import Run, equal, goes_on, stopped

import lamina


def case_api_a_training_goes_on_in_another_number_of_partitions():
    ranks = int(os.environ["WORLD_SIZE"])
    plain = stopped().states()
    for partitions in (count for count in range(1, ranks + 1) if ranks % count == 0):
        states = copy.deepcopy(stopped(partitions).states())
        equal(states, plain)
        for other in (count for count in range(1, ranks + 1) if ranks % count == 0):
            lamina.shutdown()
            goes_on(Run(other).load(states))
        lamina.shutdown()
        goes_on(Run().load(states))


def case_api_files_of_a_smaller_or_larger_job_say_so():
    ranks = int(os.environ["WORLD_SIZE"])
    path = os.path.join(os.environ["DIR"], "of a job")
    run = stopped(partitions=ranks)
    lamina.save(run.model.local_state_dict(), path)
    lamina.barrier()
    lamina.shutdown()
    lamina.init(partitions=1, microbatches=1, timeout_s=30)
    try:
        lamina.load(path)
    except lamina.UsageError as error:
        assert f"saved by a job of pp {ranks} x tp 1 ranks, this one has pp 1 x tp 1" in str(error)
    else:
        raise AssertionError("it was loaded")


def case_api_groups_are_a_device_mesh():
    ranks = int(os.environ["WORLD_SIZE"])
    partitions = 2 if ranks % 2 == 0 else 1
    lamina.init(partitions=partitions, ddp=True, timeout_s=30)
    mesh = lamina.get_device_mesh()
    assert mesh.mesh_dim_names == ("rdp", "pp", "tp")
    assert tuple(mesh.mesh.shape) == (ranks // partitions, partitions, 1)
    assert mesh.get_coordinate() == (lamina.rdp_rank(), lamina.pp_rank(), lamina.tp_rank())
    assert mesh["pp"].get_group() is lamina.get_pp_process_group()
    assert mesh["rdp"].mesh.tolist() == lamina.get_rdp_group()
    for group in lamina.CommGroup:
        assert lamina.get_device_mesh(group).mesh_dim_names == (group.value,)
    data = lamina.get_device_mesh(lamina.DP_GROUP)
    assert data.get_group() is lamina.get_dp_process_group() and data.mesh.tolist() == lamina.get_dp_group()
    total = torch.tensor([float(lamina.rank())])
    torch.distributed.all_reduce(total, group=data.get_group())
    assert total.item() == sum(lamina.get_dp_group())
