# SPDX-License-Identifier: Apache-2.0
"""Object functions and ranks in a job of one process."""

import pytest

import lamina


@pytest.mark.parametrize("group", lamina.CommGroup)
def test_in_a_group_of_one_nothing_happens(start, group):
    lamina.broadcast({"a": 1}, group)
    lamina.broadcast({"a": 2}, group)
    lamina.barrier(group)
    assert lamina.allgather("me", group) == ["me"]


def test_barriers(start):
    lamina.barrier()
    lamina.dp_barrier()
    lamina.mp_barrier()


@pytest.mark.parametrize("axis", ["mp", "dp", "pp", "tp", "rdp"])
def test_ranks(start, axis):
    assert getattr(lamina, f"{axis}_rank")() == 0
    assert getattr(lamina, f"{axis}_size")() == 1
    assert getattr(lamina, f"get_{axis}_group")() == [0]
    assert (lamina.rank(), lamina.size(), lamina.local_rank(), lamina.local_size()) == (0, 1, 0, 1)


def test_a_rank_exchanges_nothing_with_itself_or_nobody(start):
    with pytest.raises(lamina.UsageError, match="WORLD_RANK 0 is this rank itself"):
        lamina.send(1, 0, lamina.RankType.WORLD_RANK)
    with pytest.raises(lamina.UsageError, match="no PP_RANK 1, only 0 to 0"):
        lamina.recv_from(1, lamina.PP_RANK)
