# SPDX-License-Identifier: Apache-2.0
"""Ranks that join copies of a model by `lamina run --join`, with the losses of one process that nobody disturbed."""

import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
from fault.test_joining import require_undisturbed
from fault.test_joining_trainer import require_undisturbed as require_trained
from fault.test_machines import lose_machine, secret
from fault.test_outliving_trainer import LAST
from launch.launcher_harness import PRELOAD, built, command, eventually
from launch.test_launch_machines import namespaces  # noqa: F401
from soak import some

PROGRAM = Path(__file__).with_name("joining.py")
sys.path.insert(0, str(PROGRAM.parent))
SECONDS = 120
SLOW_S = 1.5  # a step takes while ranks of FULL are missing: their imports take long on a busy machine
FULL = "the job has as many ranks as --elastic allows it: 2"


class Jobs:
    """A job, and launchers of newcomers, all with one secret; machines are this one, or network namespaces of it."""

    def __init__(self, launcher):
        self.launcher, self.secret, self.port = launcher, secret(launcher), launcher.reserve_port()
        self.host = "127.0.0.1"

    def begin(self, ranks, terms, *flags, deaths=(), where=None, program=PROGRAM, **env):
        flags = ("--elastic", terms, "--join-port", self.port, "--secret-file", self.secret, *flags)
        return self._start(where, ranks, flags, program, deaths, {"SLOW_S": SLOW_S} | env)

    def join(self, ranks, name, *flags, where=None, program=PROGRAM, words=(), secret=None, **env):
        flags = ("--join", f"{self.host}:{self.port}", "--secret-file", secret or self.secret, *flags)
        return self._start(where, ranks, flags, program, words, {"NAME": name} | env)

    def _start(self, where, ranks, flags, program, words, env):
        line = ("run", *PRELOAD, "-n", ranks, *flags, program, *words)
        env = {key: str(value) for key, value in env.items()}
        with open(self.launcher.folder / f"errors.{env.get('NAME', '')}", "w") as errors:
            if where is None:
                return self.launcher.start(*line, env=env, stderr=errors)
            inside = ("netns", "exec", where, command(), *line)
            return self.launcher.start(*inside, env=env, stderr=errors, binary=shutil.which("ip"))

    def lines(self, name=""):
        return (self.launcher.folder / f"errors.{name}").read_text().splitlines()

    def wait_for(self, what, name=""):
        eventually(lambda: any(what in line for line in self.lines(name)))

    def trains(self, rank):
        """Waits until it does, and returns its process."""
        file = self.launcher.folder / f"trains.{rank}"
        eventually(lambda: file.exists() and file.read_text())
        return int(file.read_text())

    def end(self, *jobs, codes=None):
        for job, code in zip(jobs, codes or [0] * len(jobs), strict=True):
            job.communicate(timeout=SECONDS)
            assert job.returncode == code, self.all_lines()

    def all_lines(self):
        return {path.name: path.read_text() for path in self.launcher.folder.glob("errors.*")}

    def found(self, *ranks):
        names = {path.suffix[1:] for path in self.launcher.folder.glob("end.*")}
        assert names == set(ranks), self.all_lines()
        return {rank: torch.load(self.launcher.folder / f"end.{rank}") for rank in ranks}


@pytest.fixture
def jobs(launcher):
    return Jobs(launcher)


def changes(end):
    return [size for _, size, _ in end["sizes"]]


def test_those_of_one_launcher_join_a_running_job_together(jobs):
    job = jobs.begin(2, "1:4", FULL=4)
    jobs.trains("0")
    other = jobs.join(2, "a")
    jobs.end(job, other)
    found = jobs.found("0", "1", "a0", "a1")
    require_undisturbed(found, 4)
    assert changes(found["0"]) == [2, 4]
    assert found["a0"]["is_new"] and found["a1"]["is_new"]
    assert [found[rank]["place"]["LOCAL_RANK"] for rank in ("a0", "a1")] == ["0", "1"] or (
        [found[rank]["place"]["LOCAL_RANK"] for rank in ("a0", "a1")] == ["1", "0"]
    )
    assert {found[rank]["place"]["LOCAL_WORLD_SIZE"] for rank in found} == {"2"}
    assert f"lamina run: others may join: --join 127.0.0.1:{jobs.port}" in jobs.lines()
    (line,) = [line for line in jobs.lines() if "have joined" in line]
    assert line.startswith("lamina: 2 ranks have joined before step ") and ": 4 ranks, copies 4; " in line


def test_one_of_another_machine_joins(jobs, namespaces):  # noqa: F811
    jobs.host = "10.77.0.1"
    job = jobs.begin(1, "1:2", "--master-addr", jobs.host, where=namespaces[0], FULL=2)
    jobs.trains("0")
    other = jobs.join(1, "a", where=namespaces[1])
    jobs.end(job, other)
    found = jobs.found("0", "a0")
    require_undisturbed(found, 2)
    assert {end["place"]["MASTER_ADDR"] for end in found.values()} == {"10.77.0.1"}


def test_the_address_stays_right_when_the_first_rank_was_lost(jobs):
    job = jobs.begin(3, "1:4", deaths=("before:0:3",), FULL=4)
    jobs.wait_for("rank 0 is lost")
    other = jobs.join(1, "a")
    jobs.end(job, other)
    require_undisturbed(jobs.found("0", "1", "2", "a0"), 4)


def test_many_that_come_one_after_the_other_cost_one_change_more(jobs):
    job = jobs.begin(1, "1:4", "--join-every", 20, FULL=4)
    jobs.trains("0")
    others = [jobs.join(1, name) for name in ("a", "b", "c")]
    jobs.end(job, *others)
    found = jobs.found("0", "a0", "b0", "c0")
    require_undisturbed(found, 4)
    assert len(changes(found["0"])) <= 3, "the first ones, and then all others"


def test_a_spare_takes_the_place_of_a_lost_rank(jobs):
    job = jobs.begin(2, "1:2", FULL=3, SLOW_S=0.8)
    victim = jobs.trains("1")
    other = jobs.join(1, "a")
    jobs.wait_for(f"this newcomer waits, for 3600 s at most (--spare-wait): {FULL}", "a")
    os.kill(victim, signal.SIGKILL)
    jobs.end(job, other)
    found = jobs.found("0", "a0")
    require_undisturbed(found, 2)
    assert changes(found["0"]) == [2, 2], "in one change"


def test_a_spare_for_which_there_is_no_place_gives_up(jobs):
    job = jobs.begin(2, "1:2", FULL=3, SLOW_S=0.8)
    jobs.trains("1")
    other = jobs.join(1, "a", "--spare-wait", 1)
    jobs.end(other, job, codes=[1, 0])
    require_undisturbed(jobs.found("0", "1"), 2)
    line = f"this newcomer ends: it has had no place in the job for 1 s (--spare-wait): {FULL}"
    assert any(line in each for each in jobs.lines("a")), jobs.lines("a")
    assert "lamina run: rank 0 has not joined the others: exit code 1" in jobs.lines("a")


def test_a_spare_ends_in_order_with_the_job(jobs):
    job = jobs.begin(2, "1:2", FULL=3, SLOW_S=0.8)
    jobs.trains("1")
    other = jobs.join(1, "a")
    jobs.end(job, other)
    require_undisturbed(jobs.found("0", "1"), 2)
    assert any("the job was over before this process could join it" in line for line in jobs.lines("a"))


def test_one_that_has_joined_by_hand_is_killed_and_comes_back(jobs):
    job = jobs.begin(2, "1:3", FULL=4)
    jobs.trains("0")
    other = jobs.join(1, "a")
    os.kill(jobs.trains("a0"), signal.SIGKILL)
    jobs.end(job, other)
    found = jobs.found("0", "1", "a0")
    require_undisturbed(found, 3)
    assert changes(found["0"]) == [2, 3, 2, 3]
    assert "lamina run: rank 0 is started again in 0.5 s, to join them" in jobs.lines("a")


def test_a_machine_that_has_joined_by_hand_is_lost(jobs):
    job = jobs.begin(2, "1:3", FULL=4)
    jobs.trains("0")
    other = jobs.join(1, "a")
    jobs.trains("a0")
    lose_machine(other)
    jobs.end(job)
    found = jobs.found("0", "1")
    require_undisturbed(found, 2)
    assert changes(found["0"]) == [2, 3, 2]


@pytest.mark.parametrize(
    ("words", "named"),
    {
        "--join here:1": "--join needs --secret-file: the file that the launchers of the job have",
        "--join here:1 --secret-file secret --nnodes 2 --node-rank 1 --restarts 2": (
            "--join has the job that runs say where its ranks are: leave out --nnodes, --node_rank, --restarts"
        ),
        "--join here:1 --secret-file secret --elastic 1:4": "leave out --elastic",
        "--join here": "--join: here is no HOST:PORT, as in 10.0.0.3:29501",
        "--join here:0": "--join: here:0 is no HOST:PORT, as in 10.0.0.3:29501",
        "--join no.such.host.invalid:1 --secret-file secret": (
            "--join no.such.host.invalid:1: no machine of the name no.such.host.invalid is known here"
        ),
        "--elastic 1:4": "--elastic: MAX is 4, which is more than the 1 rank of the job: others join it by `lamina run "
        "--join`, which needs --secret-file here, too",
        "--elastic 1 --secret-file secret --join-port 4711": "--join-port is for jobs that others may join: it needs",
        "--elastic 1 --join-every 4": "--join-every is for jobs that others may join: it needs",
        "--elastic 1:1 --join-port 4711": "--join-port is for jobs that others may join: it needs",
        "--elastic 1:4 --secret-file secret --join-port 0": "--join-port must be from 1 to 65535, not 0",
        "--spare-wait 4": "--spare-wait is for ranks that join a job: it needs --elastic MIN:MAX, or --join",
        "--elastic 1:1 --spare-wait -1": "--spare-wait must be 0 or greater, not -1",
    }.items(),
)
def test_what_cannot_be_is_refused_before_anything_is_started(words, named, launcher):
    secret(launcher)
    run = launcher.run("run", "-n", 1, *words.split(), "-c", "touch", "started")
    assert run.returncode == 2
    assert named in run.stderr, run.stderr
    assert not (launcher.folder / "started").exists()


def test_a_port_that_is_in_use_is_refused(launcher):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = ("--elastic", "1:4", "--secret-file", secret(launcher), "--join-port", port)
        run = launcher.run("run", "-n", 1, *words, "-c", "true")
    assert run.returncode == 2
    assert f"cannot listen on 127.0.0.1 {port}: Address already in use: give another --join-port" in run.stderr


@pytest.mark.parametrize("who", ["nobody", "another server"])
def test_where_no_job_is_found_nothing_is_started(who, launcher):
    """Another server, as the store at MASTER_PORT of any job, says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if who == "nobody":
            server.close()
        words = ("--join", f"127.0.0.1:{port}", "--secret-file", secret(launcher))
        run = launcher.run("run", "-n", 1, *words, "-c", "touch", "started")
    assert run.returncode == 2
    named = f"--join 127.0.0.1:{port}: no job that others may join was found within 10 s (127.0.0.1 {port}: "
    why = "Connection refused" if who == "nobody" else "no answer in time"
    assert f"{named}{why}): its launchers, which have --elastic MIN:MAX and --secret-file, say where" in run.stderr
    assert not (launcher.folder / "started").exists()


@pytest.mark.parametrize(
    ("what", "named"),
    {
        "secret": "does not let this newcomer in: it lacks this job's secret",
        "script": "the job does not let this newcomer in: its script (SHA-256) is another one",
        "config": "its configuration is another one: seed 6; the job has seed 5",
    }.items(),
)
def test_one_that_differs_is_refused_by_name(what, named, jobs):
    job = jobs.begin(2, "1:3", FULL=3)
    jobs.trains("0")
    foreign = jobs.launcher.folder / "foreign"
    foreign.write_bytes(bytes(40))
    foreign.chmod(0o600)
    other = jobs.join(1, "a", secret=foreign if what == "secret" else None, NEWCOMER=what)
    jobs.end(other, job, codes=[1, 0])
    require_undisturbed(jobs.found("0", "1"), 2)
    assert any(named in line and "[elastic-newcomer]" in line for line in jobs.lines("a")), jobs.lines("a")


def test_one_joins_a_trainer(jobs):
    program = PROGRAM.with_name("joining_trainer.py")
    job = jobs.begin(2, "1:3", program=program, deaths=("plain", "none:9:0"), FULL=3)
    other = jobs.join(1, "a", program=program, words=("plain", "none:9:0"), FULL=3, BEGAN=2)
    jobs.end(job, other)
    found = {rank: torch.load(jobs.launcher.folder / f"end.{rank}", weights_only=False) for rank in ("0", "1", "a0")}
    require_trained(found, 3, "plain", of=2)
    assert found["a0"]["is_new"]


@pytest.mark.parametrize("way", some(["partitions", "groups", "shards", "divided"], 1, seed=3))
def test_one_joins_a_trainer_whose_ranks_have_parts(way, jobs):
    program = PROGRAM.with_name("joining_trainer.py")
    words = (way, "none:9:0")
    job = jobs.begin(4, "1:5", program=program, deaths=words, FULL=5)
    jobs.trains("0")
    other = jobs.join(1, "a", program=program, words=words, FULL=5, BEGAN=4)
    jobs.end(job, other)
    ranks = ("0", "1", "2", "3", "a0")
    found = {rank: torch.load(jobs.launcher.folder / f"end.{rank}", weights_only=False) for rank in ranks}
    require_trained(found, 5, way, of=4, left_out=LAST)
    assert found["a0"]["is_new"]


def test_one_joins_a_program_in_cpp(jobs):
    """Which compares its losses with one process itself."""
    program = built("bin/frontend_outliving")
    job = jobs.begin(2, "1:3", "-c", program=program, deaths=("none", "0:0", "back"), FULL=3)
    jobs.wait_for("others may join")
    other = jobs.join(1, "a", "-c", program=program, words=("none", "0:0", "back"), FULL=3)
    jobs.end(job, other)
    assert any("1 rank has joined before step" in line for line in jobs.lines()), jobs.all_lines()
