# SPDX-License-Identifier: Apache-2.0
"""A witness on a third machine: of two machines whichever is left goes on, and never both."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch
from fault.test_joining import require_undisturbed as require_joined
from fault.test_joining_by_hand import jobs as by_hand  # noqa: F401
from fault.test_joining_parts import require_undisturbed as require_joined_parts
from fault.test_joining_trainer import require_undisturbed as require_trained
from fault.test_machines import ends, found, lose_machine, secret, start
from fault.test_outliving import PROGRAM, require_undisturbed
from fault.test_outliving_parts import LAYOUTS
from fault.test_outliving_parts import require_undisturbed as require_kept
from launch.launcher_harness import built, command, eventually
from launch.test_launch_machines import namespaces  # noqa: F401
from soak import some

SLOW = {"SLOW_S": "1.5", "FULL": "4"}  # as long as not so many train
VOTE = "lamina run: its vote is for epoch 1 of 2 members "


def begin(launcher, sizes=(2, 2), address="127.0.0.1", names=None, within=None, port=None, **env):
    """A witness, and launchers with so many ranks; steps have begun."""
    place = f"{within or '127.0.0.1'}:{port or launcher.reserve_port()}"
    words = ("run", "--witness", place, "--secret-file", secret(launcher))
    if names is None:
        witness = launcher.start(*words)
    else:
        witness = launcher.start("netns", "exec", names[2], command(), *words, binary=shutil.which("ip"))
    elastic = f"1 --witness {place} --secret-file {secret(launcher)}"
    jobs = start(launcher, sizes, ("slow",), address, elastic, names, env={"STEP_S": "0.4"} | env, port=port)
    eventually(lambda: (launcher.folder / "steps.0").exists())
    return witness, jobs


@pytest.mark.parametrize("lost", some([0, 1], 1, seed=3))
def test_whichever_machine_is_lost_the_other_one_goes_on(lost, launcher):
    witness, jobs = begin(launcher)
    lose_machine(jobs[lost])
    left = [rank for rank in range(4) if rank // 2 != lost]
    (lines,) = ends([jobs[1 - lost]], [0])
    require_undisturbed(found(launcher, left), 2)
    assert [line for line in lines if line.startswith(f"lamina: lost ranks {2 * lost}, {2 * lost + 1} ")], lines
    (told,) = ends([witness], [0])
    assert f"{VOTE}({left[0]}, {left[1]})" in told, told
    assert told[-1] == "lamina run: no rank of the job is left, or it is over"


def test_a_smaller_machine_goes_on_without_the_larger_one_that_had_the_first_rank(launcher):
    witness, jobs = begin(launcher, (3, 1))
    lose_machine(jobs[0])
    ends([jobs[1], witness], [0, 0])
    require_undisturbed(found(launcher, (3,)), 1)


def test_a_rank_that_has_come_back_has_the_witness_too(launcher):
    place = f"127.0.0.1:{launcher.reserve_port()}"
    witness = launcher.start("run", "--witness", place, "--secret-file", secret(launcher))
    elastic = f"1:4 --witness {place} --secret-file {secret(launcher)}"
    words = ("before:1:3", "launcher:2:25")
    program = PROGRAM.with_name("joining.py")
    jobs = start(launcher, (2, 2), words, elastic=elastic, program=program, env={"SLOW_S": "1"})
    eventually(lambda: (launcher.folder / "now").exists())
    lose_machine(jobs[0])
    (lines,) = ends(jobs[1:], [0])
    results = found(launcher, (2, 3))
    require_joined(results, 2)
    assert [size for _, size, _ in results[2]["sizes"]] == [4, 3, 4, 2], lines
    ends([witness], [0])


@pytest.mark.parametrize("layout", some(sorted(LAYOUTS), 1, seed=6))
def test_the_machine_of_the_first_rank_is_lost_with_parts_that_it_alone_had(layout, launcher, monkeypatch):
    place = f"127.0.0.1:{launcher.reserve_port()}"
    witness = launcher.start("run", "--witness", place, "--secret-file", secret(launcher))
    elastic = f"1 --witness {place} --secret-file {secret(launcher)}"
    words = (json.dumps(LAYOUTS[layout]), "before", "0", "1")
    ends(start(launcher, (2, 2), words, elastic=elastic, program=PROGRAM.with_name("outliving_parts.py")), [137, 0])
    require_kept(found(launcher, (2, 3)), monkeypatch)
    ends([witness], [0])


def begin_with_joiners(by_hand, *words, program="joining.py", **env):  # noqa: F811
    """A witness, and a job of two machines with a rank each, which a third one may join by hand; it trains."""
    launcher = by_hand.launcher
    place = f"127.0.0.1:{launcher.reserve_port()}"
    witness = launcher.start("run", "--witness", place, "--secret-file", by_hand.secret)
    elastic = [
        f"1:3 --witness {place} --secret-file {by_hand.secret} --join-port {port}"
        for port in (by_hand.port, launcher.reserve_port())
    ]
    program = PROGRAM.with_name(program)
    jobs = start(launcher, (1, 1), words, elastic=elastic, program=program, env=SLOW | env)
    by_hand.trains("0")
    return witness, jobs


def join_by_hand(by_hand, **env):  # noqa: F811
    other = by_hand.join(1, "a", **SLOW, **env)
    by_hand.trains("a0")
    return other


def test_one_that_has_joined_by_hand_goes_on_alone_with_the_witness(by_hand):  # noqa: F811
    witness, jobs = begin_with_joiners(by_hand)
    other = join_by_hand(by_hand)
    for job in jobs:
        lose_machine(job)
    by_hand.end(other)
    ends([witness], [0])
    results = by_hand.found("a0")
    require_joined(results, 1)
    assert results["a0"]["sizes"][0][1] == 3


@pytest.mark.parametrize("layout", some(["pp 2", "shard_optimizer_state"], 1, seed=7))
def test_one_that_has_joined_parts_by_hand_has_the_witness_too(layout, by_hand, monkeypatch):  # noqa: F811
    """Two of three machines need it: the third one could go on with it alone."""
    keys = {"pp 2": {"partitions": 2, "microbatches": 12}}.get(layout, {layout: True, "microbatches": 6})
    env = {"KEYS": json.dumps(keys)}
    witness, jobs = begin_with_joiners(by_hand, **env)
    other = join_by_hand(by_hand, **env)
    lose_machine(jobs[0])
    by_hand.end(other)
    told = ends([*jobs[1:], witness], [0, 0])[-1]
    results = by_hand.found("1", "a0")
    require_joined_parts(results, layout, monkeypatch, ranks=2)
    assert any(line.startswith("lamina run: its vote is for epoch ") for line in told), told


def test_one_that_has_joined_a_trainer_by_hand_has_the_witness_too(by_hand):  # noqa: F811
    """The first one comes back."""
    words, program = ("rows", "forward:0:8"), "joining_trainer.py"
    witness, jobs = begin_with_joiners(by_hand, *words, program=program, FULL="3")
    new = {"program": PROGRAM.with_name(program), "words": words, "BEGAN": 2, "FULL": 3}
    by_hand.end(by_hand.join(1, "a", **new))
    ends([*jobs, witness], [0] * 3)
    results = {
        rank: torch.load(by_hand.launcher.folder / f"end.{rank}", weights_only=False) for rank in ("0", "1", "a0")
    }
    require_trained(results, 3, "rows", of=2)
    assert [size for _, size, _ in results["a0"]["layouts"]] == [3, 2, 3]


def test_one_may_join_by_hand_when_the_witness_was_lost(by_hand):  # noqa: F811
    witness, jobs = begin_with_joiners(by_hand)
    steps = by_hand.launcher.folder / "steps.0"
    eventually(steps.exists)
    witness.kill()
    later = time.time() + 3
    eventually(lambda: steps.stat().st_mtime > later)
    other = join_by_hand(by_hand)
    lose_machine(jobs[0])
    by_hand.end(other)
    ends(jobs[1:], [0])
    require_joined(by_hand.found("1", "a0"), 2)


LOSSES = [(signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGSTOP, 1)]


@pytest.mark.parametrize(("sent", "lost"), some(LOSSES, 1, seed=4))
def test_without_a_witness_that_was_lost_it_is_the_machine_with_the_first_rank(sent, lost, launcher):
    witness, jobs = begin(launcher, STEP_S="1", SILENT="2")
    witness.send_signal(sent)
    # In one step a rank notices, once it has been silent, in the next it hears that the others have, too.
    later = time.time() + (3 if sent == signal.SIGKILL else 6)
    eventually(lambda: (launcher.folder / "steps.0").stat().st_mtime > later)
    lose_machine(jobs[lost])
    (lines,) = ends([jobs[1 - lost]], [0 if lost == 1 else 1])
    witness.kill()
    if lost == 0:
        found(launcher, ())
        assert [line for line in lines if "are no majority, without 0, 1" in line], lines
        return
    require_undisturbed(found(launcher, (0, 1)), 2)
    why = "the connection has ended" if sent == signal.SIGKILL else "no answer for "
    assert [line for line in lines if f"is lost ({why}" in line and "the job goes on without one" in line], lines


def in_cpp(launcher, name, *words):
    """A witness, and the program with two ranks on each of two machines; it compares its losses with one process."""
    place = f"127.0.0.1:{launcher.reserve_port()}"
    witness = launcher.start("run", "--witness", place, "--secret-file", secret(launcher))
    elastic = f"1 --witness {place} --secret-file {secret(launcher)} -c"
    return witness, start(launcher, (2, 2), words, elastic=elastic, program=built(f"bin/{name}"))


def test_a_program_in_cpp_goes_on_without_the_machine_of_the_first_rank(launcher):
    witness, jobs = in_cpp(launcher, "frontend_outliving", "forward", "0", "1")
    _, lines = ends(jobs, [137, 0])
    assert [line for line in lines if line.startswith("lamina: lost ranks 0, 1 ")], lines
    (told,) = ends([witness], [0])
    assert f"{VOTE}(2, 3)" in told, told


@pytest.mark.parametrize("layout", some(["partitions", "shards", "divided"], 1, seed=8))
def test_a_program_in_cpp_goes_on_with_parts_that_the_machine_of_the_first_rank_had(layout, launcher):
    witness, jobs = in_cpp(launcher, "frontend_outliving_parts", layout, "before", "0", "1")
    ends([*jobs, witness], [137, 0, 0])


def test_a_program_in_cpp_goes_on_without_the_witness(launcher):
    witness, jobs = in_cpp(launcher, "frontend_outliving", "forward", "2:30", "3:30", "slow")
    eventually((launcher.folder / "steps.0").exists)
    witness.kill()
    lines, _ = ends(jobs, [0, 137])
    assert [line for line in lines if "is lost (" in line and "the job goes on without one" in line], lines
    assert [line for line in lines if line.startswith("lamina: lost ranks 2, 3 ")], lines


@pytest.fixture
def three_machines(namespaces):  # noqa: F811
    """The third one is joined to both others by cables of their own; it is 10.79.0.3."""
    third = f"lamina-{os.getpid()}-c"

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    with contextlib.ExitStack() as stack:
        ip("netns", "add", third)
        stack.callback(ip, "netns", "del", third)
        ip("-n", third, "link", "set", "lo", "up")
        ip("-n", third, "address", "add", "10.79.0.3/32", "dev", "lo")
        for number, name in enumerate(namespaces, 1):
            ip("link", "add", "aside", "netns", name, "type", "veth", "peer", "name", f"to{number}", "netns", third)
            ip("-n", name, "address", "add", f"10.78.{number}.1/24", "dev", "aside")
            ip("-n", third, "address", "add", f"10.78.{number}.2/24", "dev", f"to{number}")
            ip("-n", name, "link", "set", "aside", "up")
            ip("-n", third, "link", "set", f"to{number}", "up")
            ip("-n", name, "route", "add", "10.79.0.3", "via", f"10.78.{number}.2")
        yield [*namespaces, third]


def test_of_two_machines_that_are_cut_apart_one_goes_on(three_machines, launcher):
    env = {"SILENT": "3", "UCX_NET_DEVICES": "cable"}  # the other cables do not join them
    witness, jobs = begin(launcher, address="10.77.0.1", names=three_machines, within="10.79.0.3", port=29500, **env)
    subprocess.run(["ip", "-n", three_machines[0], "link", "set", "cable", "down"], check=True)
    lines = [job.communicate(timeout=120)[1].splitlines() for job in jobs]
    assert sorted(job.returncode == 0 for job in jobs) == [False, True], lines
    first = 0 if jobs[0].returncode == 0 else 2
    require_undisturbed(found(launcher, (first, first + 1)), 2)
    (told,) = ends([witness], [0])
    # The ranks that are lost may be found one by one.
    assert [line for line in told if line.endswith(f" of 2 members ({first}, {first + 1})")], told
    ended = lines[1 if first == 0 else 0]
    assert [line for line in ended if "the ranks that are left do not go on: " in line], ended


def test_a_job_whose_witness_does_not_answer_begins_without_it_and_says_so(launcher):
    elastic = f"1 --witness 127.0.0.1:{launcher.reserve_port()} --secret-file {secret(launcher)}"
    first, _ = ends(start(launcher, (1, 1), ("none",), elastic=elastic, env={"SILENT": "1"}), [0, 0])
    assert [line for line in first if "is lost (nobody answers there): the job goes on without one" in line], first


def test_another_secret_is_refused(launcher):
    other = launcher.folder / "other"
    other.write_bytes(bytes(40))
    other.chmod(0o600)
    place = f"127.0.0.1:{launcher.reserve_port()}"
    witness = launcher.start("run", "--witness", place, "--secret-file", other)
    elastic = f"1 --witness {place} --secret-file {secret(launcher)}"
    first, _ = ends(start(launcher, (1, 1), ("none",), elastic=elastic), [1, 1])
    assert [line for line in first if f"the process at --witness {place} is not the witness of this job" in line], first
    witness.send_signal(signal.SIGINT)
    ends([witness], [130])


def test_it_is_the_witness_of_one_job(launcher):
    witness, jobs = begin(launcher, (1, 1), STEP_S="60")
    place = witness.args[witness.args.index("--witness") + 1]
    elastic = f"1 --witness {place} --secret-file {secret(launcher)}"
    first, _ = ends(start(launcher, (1, 1), ("none",), elastic=elastic), [1, 1])
    assert [line for line in first if "it is the witness of another job, which runs" in line], first
    for job in (*jobs, witness):
        job.send_signal(signal.SIGINT)
    ends([*jobs, witness], [130] * 3)


def test_launchers_are_to_have_the_same_witness(launcher):
    elastic = [f"1 --secret-file {secret(launcher)}", f"1 --witness 127.0.0.1:4711 --secret-file {secret(launcher)}"]
    lines = ends(start(launcher, (1, 1), ("none",), elastic=elastic), [1, 1])
    named = "are to be given the same --elastic and --witness: machine 0 has --elastic 1, and machine 1 --elastic 1 --"
    assert [line for line in lines[0] if named in line], lines


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--witness", "127.0.0.1"), "127.0.0.1 is no HOST:PORT"),
        (("--witness", "127.0.0.1:4711"), "--witness needs --secret-file"),
        (("--witness", "127.0.0.1:4711", "--secret-file", "secret", "-n", 2), "which has no ranks: leave out -n"),
        (
            ("--witness", "127.0.0.1:4711", "--secret-file", "secret", "--elastic", 1, "--nnodes", 2),
            "leave out --nnodes, --elastic",
        ),
        (("--witness", "127.0.0.1:4711", "--secret-file", "secret", "-n", 2, "-c", "true"), "give --elastic, too"),
        (("--witness", "192.0.2.1:4711", "--secret-file", "secret"), "this machine cannot be the witness there"),
        (
            ("--witness", "no.such.host.invalid:1", "--secret-file", "secret"),
            "no machine of the name no.such.host.invalid",
        ),
    ],
)
def test_wrong_words_are_told_before_anything_begins(words, told, launcher):
    secret(launcher)
    run = launcher.run("run", *words)
    assert run.returncode == 2 and told in run.stderr, run.stderr
