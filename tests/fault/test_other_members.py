# SPDX-License-Identifier: Apache-2.0
"""A job that goes on with another process in the place of one that was killed."""

import sys
from pathlib import Path

import pytest
import torch
from launch.forked_ranks import ForkedRank
from torch import nn

PROGRAM = Path(__file__).with_name("other_members.py")
sys.path.insert(0, str(PROGRAM.parent))


def plain():
    """The weights after all steps in one process, with the rows of all ranks."""
    argv, sys.argv = sys.argv, ["", "0", "0"]
    import other_members

    sys.argv = argv
    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(other_members.STEPS):
        optimizer.zero_grad()
        other_members.update(model, other_members.batch(step))
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("victim", [0, 1])
def test_those_who_stay_and_one_who_comes_train_as_one_process(victim, launcher):
    port = launcher.reserve_port()
    ranks = launcher.start_ranks(3, PROGRAM, victim, port)
    names = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "LAMINA_EPOCH": "1"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    newcomer = ForkedRank([str(PROGRAM), str(victim), str(port)], launcher.environment(**names), launcher.folder)
    launcher.started.append(newcomer)
    outputs = [rank.communicate(timeout=90)[1] for rank in [*ranks, newcomer]]
    codes = [rank.returncode for rank in [*ranks, newcomer]]
    assert [code for number, code in enumerate(codes) if number != victim] == [0, 0, 0], outputs
    expected = plain()
    for rank in range(3):
        found = torch.load(launcher.folder / f"weights.{rank}")
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
