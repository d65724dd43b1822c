# SPDX-License-Identifier: Apache-2.0
"""Copies of a model on several machines, each with a launcher of its own: the others go on without ranks or machines
that are lost. The machines are this one, or network namespaces of it."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from fault.test_joining import require_undisturbed as require_joined
from fault.test_outliving import PROGRAM, require_undisturbed
from fault.test_outliving_parts import LAYOUTS
from fault.test_outliving_parts import require_undisturbed as require_kept
from launch.launcher_harness import PRELOAD, command, eventually
from launch.test_launch_machines import namespaces  # noqa: F401
from soak import some


def start(launcher, sizes, words, address="127.0.0.1", elastic="1", names=None, program=PROGRAM, env=None, port=None):
    """A launcher for each machine, with so many ranks."""
    port = port or launcher.reserve_port()
    elastic = [elastic] * len(sizes) if isinstance(elastic, str) else elastic
    jobs, base = [], 0
    for node, ranks in enumerate(sizes):
        flags = ["run", *PRELOAD, "-n", ranks, "--world_size", sum(sizes), "--base_rank", base, "--node_rank", node]
        flags += [
            "--master_addr",
            address,
            "--master_port",
            port,
            "--elastic",
            *elastic[node].split(" "),
            program,
            *words,
        ]
        if names is None:
            jobs.append(launcher.start(*flags, env=env))
        else:
            namespace = ("netns", "exec", names[node], command())
            jobs.append(launcher.start(*namespace, *flags, env=env, binary=shutil.which("ip")))
        base += ranks
    return jobs


def ends(jobs, codes):
    lines = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs] == codes, "\n".join(lines)
    return [each.splitlines() for each in lines]


def found(launcher, ranks):
    assert {int(path.suffix[1:]) for path in launcher.folder.glob("end.*")} == set(ranks)
    return {rank: torch.load(launcher.folder / f"end.{rank}") for rank in ranks}


def places(results):
    return {rank: [end["place"][name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] for rank, end in
            results.items()}  # fmt: skip


def descendants(pid):
    children = [int(each) for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()]
    return children + [each for child in children for each in descendants(child)]


def lose_machine(job):
    """Its launcher and all that it has started end at once."""
    pids = [job.pid, *descendants(job.pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    job.wait(30)


def test_a_rank_of_two_machines_is_lost(launcher):
    first, second = ends(start(launcher, (2, 2), ("before", "2")), [0, 0])
    assert "lamina run: rank 2 is lost: killed by signal 9 (SIGKILL); 1 other goes on" in second
    assert not [line for line in first if "lamina run:" in line], first
    assert [line for line in first if line.startswith("lamina: lost rank 2 (machine ")], first
    results = found(launcher, (0, 1, 3))
    require_undisturbed(results, 3)
    assert places(results) == {0: ["0", "0", "2"], 1: ["1", "1", "2"], 3: ["2", "0", "1"]}
    assert {rank: end["node"] for rank, end in results.items()} == {0: [0, 1], 1: [0, 1], 3: [2]}


def test_the_machine_with_the_first_rank_goes_on_and_the_other_one_ends(launcher):
    first, second = ends(start(launcher, (2, 2), ("before", "2", "3")), [0, 137])
    require_undisturbed(found(launcher, (0, 1)), 2)
    last = "is lost: killed by signal 9 (SIGKILL); no other one of this machine is left"
    assert len([line for line in second if line.endswith(last)]) == 1, second
    assert not [line for line in first if "lamina run:" in line], first


def test_half_the_ranks_without_the_first_one_end_and_say_so(launcher):
    _, second = ends(start(launcher, (2, 2), ("before", "0", "1")), [137, 1])
    found(launcher, ())
    assert [line for line in second if "are no majority" in line and "[elastic-ended]" in line], second


def test_fewer_than_min_of_all_machines_end(launcher):
    first, _ = ends(start(launcher, (2, 1), ("before", "2"), elastic="3"), [1, 137])
    found(launcher, ())
    assert [line for line in first if "has fewer than the 3 members that the job needs" in line], first


def test_a_machine_with_the_first_rank_is_lost_at_once(launcher, namespaces):  # noqa: F811
    """Its launcher, too. Two of three ranks go on, and meet at the address of their own machine."""
    jobs = start(launcher, (1, 2), ("slow",), "10.77.0.1", names=namespaces, env={"STEP_S": "0.3"}, port=29500)
    eventually(lambda: (launcher.folder / "steps.0").exists())
    lose_machine(jobs[0])
    (lines,) = ends(jobs[1:], [0])
    results = found(launcher, (1, 2))
    require_undisturbed(results, 2)
    assert {end["place"]["MASTER_ADDR"] for end in results.values()} == {"10.77.0.2"}
    assert [line for line in lines if line.startswith("lamina: lost rank 0 (machine 10.77.0.1) in step ")], lines


def secret(launcher):
    file = launcher.folder / "secret"
    file.write_bytes(bytes(range(40)))
    file.chmod(0o600)
    return file


def test_one_that_is_lost_comes_back_on_its_machine(launcher, namespaces):  # noqa: F811
    elastic = f"2:4 --secret-file {secret(launcher)}"
    program = PROGRAM.with_name("joining.py")
    jobs = start(launcher, (2, 2), ("before:2:3",), "10.77.0.1", elastic, namespaces, program, port=29500)
    first, second = ends(jobs, [0, 0])
    results = found(launcher, range(4))
    assert results[2]["is_new"], second
    require_joined(results, 4)
    assert places(results) == {0: ["0", "0", "2"], 1: ["1", "1", "2"], 3: ["2", "0", "2"], 2: ["3", "1", "2"]}
    assert [line for line in first if "lamina: 1 rank has joined before step " in line], first


def test_a_machine_that_has_lost_all_of_its_ranks_finds_a_job_with_another_first_rank(launcher):
    """Nobody there has heard of it: the other launchers know."""
    elastic = f"1:4 --secret-file {secret(launcher)}"
    deaths = ("before:3:3", "before:0:4")
    ends(start(launcher, (2, 1, 1), deaths, elastic=elastic, program=PROGRAM.with_name("joining.py")), [0, 0, 0])
    results = found(launcher, range(4))
    assert {rank for rank, end in results.items() if end["is_new"]} == {0, 3}
    assert [size for _, size, _ in results[1]["sizes"]][:3] == [4, 3, 2]
    require_joined(results, 4)


def test_the_only_rank_of_a_machine_stands_still_and_comes_back(launcher):
    """No other one there tells its launcher that it counts as lost, which finds that it is stopped."""
    elastic = f"2:3 --secret-file {secret(launcher)}"
    env = {"STOPS": "1", "SILENT": "2", "SLOW_S": "0.7"}
    jobs = start(launcher, (2, 1), ("before:2:3",), elastic=elastic, program=PROGRAM.with_name("joining.py"), env=env)
    first, second = ends(jobs, [0, 0])
    results = found(launcher, range(3))
    assert results[2]["is_new"], second
    require_joined(results, 3)
    assert "lamina run: rank 2 gave no sign of life, and the others go on without it: killed" in second
    assert "lamina run: rank 2 is lost: killed by signal 9 (SIGKILL); no other one of this machine is left" in second
    assert [line for line in first if "lamina: 1 rank has joined before step " in line], first


def test_a_machine_that_comes_back_needs_the_secret(launcher):
    words = ("--nnodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1", "--master-port", 4711, "--elastic", "1:4")
    run = launcher.run("run", "-n", 2, *words, "-c", "true")
    assert run.returncode == 2 and "--elastic MIN:MAX on several machines needs --secret-file" in run.stderr


def test_launchers_that_are_told_otherwise_are_refused(launcher):
    lines = ends(start(launcher, (1, 1), ("none",), elastic=("1", "2")), [1, 1])
    named = "are to be given the same --elastic and --witness: machine 0 has --elastic 1, and machine 1 --elastic 2"
    assert [line for line in lines[0] if named in line], lines


@pytest.mark.parametrize("layout", some(sorted(LAYOUTS), 1, seed=5))
def test_a_machine_is_lost_with_parts_that_it_alone_had(layout, launcher, monkeypatch):
    """Its keepers are on the other machine."""
    words = (json.dumps(LAYOUTS[layout]), "before", "2", "3")
    ends(start(launcher, (2, 2), words, program=PROGRAM.with_name("outliving_parts.py")), [0, 137])
    require_kept(found(launcher, (0, 1)), monkeypatch)


@pytest.mark.parametrize("victims", some([("1", "2"), ("0",), ("3",)], 1, seed=5))
def test_ranks_of_three_machines_with_parts_are_lost(victims, launcher, monkeypatch):
    words = (json.dumps({"partitions": 5, "microbatches": 12}), "backward", *victims)
    codes = [137 if "0" in victims else 0, 0, 0]
    ends(start(launcher, (1, 3, 1), words, program=PROGRAM.with_name("outliving_parts.py")), codes)
    require_kept(found(launcher, set(range(5)) - set(map(int, victims))), monkeypatch)
