# SPDX-License-Identifier: Apache-2.0
"""Ranks of lamina.dist that do not find each other: each start that cannot be is said, by whom, and in time."""

import os
import socket
from pathlib import Path

import pytest
from launch.forked_ranks import ForkedRank, fork_server
from launch.launcher_harness import DEADLINE_S, eventually

PROGRAM = Path(__file__).with_name("dist_start.py")


class Start:
    """Processes with the variables that a launcher should have given them; those that start them have loaded."""

    def __init__(self, launcher):
        for server in [fork_server(rank, os.environ) for rank in range(3)]:
            eventually(lambda server=server: Path(server.path).exists())
        self.launcher = launcher
        self.port = launcher.reserve_port()
        self.processes = []

    def rank(self, rank, size, timeout_s, **variables):
        folder = self.launcher.folder / str(len(self.processes))
        folder.mkdir()
        told = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port} | variables  # fmt: skip
        environment = self.launcher.environment(**{name: str(value) for name, value in told.items()})
        self.processes.append(ForkedRank([str(PROGRAM), str(timeout_s)], environment, folder))
        self.launcher.started.append(self.processes[-1])
        return self.processes[-1]

    def said(self):
        """Returns for each process the seconds until initialize_dist ended, and the error."""
        answers = []
        for process in self.processes:
            out, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, errors
            seconds, _, words = out.strip().partition(" ")
            answers.append((float(seconds), words))
        return answers


@pytest.fixture
def start(launcher):
    return Start(launcher)


def test_a_rank_that_is_missing_is_named_by_all_within_the_timeout_and_1_s(start):
    for rank in (0, 2):
        start.rank(rank, 3, 2)
    for seconds, words in start.said():
        assert words.startswith("lamina.errors.TimeoutError: rank 1 did not join within 2 s: was it started")
        assert seconds <= 3


def test_where_rank_0_is_missing_the_others_say_so(start):
    start.rank(1, 2, 1)
    [(seconds, words)] = start.said()
    assert words.startswith("lamina.errors.TimeoutError: ") and words.endswith("did rank 0 start? [start-rank-missing]")
    assert seconds <= 2


def test_a_process_that_takes_anothers_rank_is_told_at_once(start):
    for rank in (0, 1, 1):
        start.rank(rank, 3, 3)
    words = sorted(words for _, words in start.said())
    assert words[0] == "lamina.errors.ConfigError: two processes call themselves rank 1: check RANK [start-rank-twice]"
    assert all("rank 2 did not join within 3 s" in each for each in words[1:])


def test_ranks_that_know_of_different_worlds_say_so(start):
    start.rank(0, 2, 20)
    start.rank(1, 3, 20)
    for seconds, words in start.said():
        assert words.startswith("lamina.errors.ConfigError: ranks 0 and 1 differ in their WORLD_SIZE: 2 and 3")
        assert seconds < 20


def test_a_port_that_somebody_else_has_is_an_error_of_rank_0(start):
    with socket.create_server(("", 0)) as server:
        start.rank(0, 2, 5, MASTER_PORT=server.getsockname()[1])
        [(seconds, words)] = start.said()
    assert words.startswith("lamina.errors.Error: rank 0 cannot host the job's store at MASTER_ADDR:MASTER_PORT")
    assert seconds <= 6


def test_of_two_jobs_on_one_port_the_second_is_told_and_the_first_one_runs(start):
    """Each of two ranks; rank 1 of the second one comes to the first one's store, where nobody of its job is."""
    start.rank(0, 2, 30, TORCHELASTIC_RUN_ID="first")
    late = [start.rank(rank, 2, 1, TORCHELASTIC_RUN_ID="second") for rank in range(2)]
    for process in late:
        process.wait(DEADLINE_S)
    start.rank(1, 2, 30, TORCHELASTIC_RUN_ID="first")
    (_, first), *second, (_, last) = start.said()
    assert [first, last] == ["nothing", "nothing"]
    assert second[0][1].startswith("lamina.errors.Error: rank 0 cannot host the job's store")
    assert second[1][1].startswith("lamina.errors.TimeoutError: rank 0 did not join within 1 s")
    assert all(seconds <= 2 for seconds, _ in second)
