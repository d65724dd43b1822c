# SPDX-License-Identifier: Apache-2.0
"""Cases of ranks and groups of two pipelines, and of what each of them computes, for four ranks."""

import os

import torch
from multiprocess import cases_step_check, drawing
from multiprocess.cases_checkpointing import SCHEDULES, Around, Block, assert_equal, placed, plain, seeded, train
from torch import nn

import lamina

RANK = int(os.environ.get("RANK", 0))


def start(**keys):
    lamina.init(**({"partitions": 2, "microbatches": 2, "timeout_s": 30} | keys))


def ranks():
    return [getattr(lamina, f"{axis}_rank")() for axis in ("pp", "dp", "rdp", "tp", "mp")]


def case_ranks_and_groups_when_a_pipelines_ranks_are_adjacent():
    start(placement_strategy="cluster")
    assert lamina.get_pp_group() == lamina.get_mp_group() == [[0, 1], [2, 3]][RANK // 2]
    assert lamina.get_dp_group() == lamina.get_rdp_group() == [[0, 2], [1, 3]][RANK % 2]
    assert lamina.get_tp_group() == [RANK]
    assert ranks() == [RANK % 2, RANK // 2, RANK // 2, 0, RANK % 2]
    assert (lamina.rank(), lamina.local_rank(), lamina.size(), lamina.local_size()) == (RANK, RANK, 4, 4)


def case_ranks_and_groups_when_they_are_spread():
    start(placement_strategy="spread")
    assert lamina.get_pp_group() == [[0, 2], [1, 3]][RANK % 2]
    assert lamina.get_dp_group() == [[0, 1], [2, 3]][RANK // 2]
    assert ranks() == [RANK // 2, RANK % 2, RANK % 2, 0, RANK // 2]


def case_objects_within_groups():
    start()
    assert lamina.allgather(RANK, lamina.DP_GROUP) == lamina.get_dp_group()
    assert lamina.allgather(RANK, lamina.WORLD) == [0, 1, 2, 3]
    if lamina.dp_rank() == 0:
        lamina.broadcast(("from", RANK), lamina.DP_GROUP)
    else:
        assert lamina.recv_from(0, lamina.RankType.DP_RANK) == ("from", lamina.get_dp_group()[0])
    if RANK == 3:
        lamina.broadcast("to all", lamina.WORLD)
    else:
        assert lamina.recv_from(3, lamina.RankType.WORLD_RANK) == "to all"


def case_each_pipeline_steps_on_its_own_batch_with_the_values_of_rank_0():
    start()
    torch.manual_seed(RANK)
    model = lamina.distribute(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    batch = torch.full((4, 3), float(lamina.dp_rank()))
    output = lamina.step(lambda x: model(x))(batch).concat()
    assert torch.allclose(output, plain(batch), atol=1e-6)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def case_with_one_partition_all_copies_begin_with_the_values_of_rank_0():
    start(partitions=1)
    torch.manual_seed(RANK)
    model = lamina.distribute(nn.Linear(3, 1))
    torch.manual_seed(0)
    plain = nn.Linear(3, 1)
    assert model.partitioned and lamina.dp_size() == 4
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    batch = torch.full((4, 3), float(RANK))
    assert torch.allclose(lamina.step(lambda x: model(x))(batch).concat(), plain(batch))


def case_random_numbers_over_four_partitions_are_those_of_one_rank():
    alone = drawing.train(1, replica=0)
    for schedule in ("simple", "interleaved", "zero_bubble"):
        drawing.assert_same(drawing.train(4, schedule=schedule), alone)
        drawing.assert_same(drawing.train(4, schedule=schedule, reentrant=False, default_partition=3), alone)


def case_random_numbers_of_two_pipelines_are_those_of_one_rank_with_both_batches():
    whole = drawing.train(4)
    start()
    replica = lamina.dp_rank()
    lamina.shutdown()
    half = drawing.train(2, microbatches=2, batch=drawing.BATCH[4 * replica : 4 * replica + 4])
    for losses, all_losses in zip(half.losses, whole.losses, strict=True):
        assert torch.equal(losses, all_losses[2 * replica : 2 * replica + 2])


def case_each_copy_of_a_pipeline_is_compared_with_the_plain_model():
    words = "copy 1, microbatch 0: output of layers.2 on rank 3"
    cases_step_check.refused(f"step 0, {words}", "scaled", ddp=True, verify_steps=1)
    cases_step_check.refused(f"step 1, {words}", "scaled", at=1, ddp=True, verify_steps=2)


def case_checkpoints_within_checkpoints_over_four_partitions():
    def build(use_reentrant):
        inner = Around(Around(Around(Block(), True), False), use_reentrant)
        return nn.Sequential(Block(), inner, Block())

    def place(model):
        placed(model, 0, 1, 0)
        for depth, path in enumerate(("1.child", "1.child.child", "1.child.child.child"), start=2):
            lamina.set_partition(model.get_submodule(path), depth % 4)
        lamina.set_activation_checkpointing(model.get_submodule("1.child"))

    for schedule, use_reentrant in zip(SCHEDULES, (True, False, False), strict=True):
        found = train(seeded(lambda use=use_reentrant: build(use)), place, partitions=4, schedule=schedule)
        assert_equal(found, plain(seeded(lambda use=use_reentrant: build(use))))
