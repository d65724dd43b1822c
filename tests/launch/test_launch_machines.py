# SPDX-License-Identifier: Apache-2.0
"""Several launchers that make one job: on different addresses of one machine, and in network namespaces."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess

import pytest
from launch.launcher_harness import PRELOAD_COMPILER, READY, command, eventually

PROGRAM = pathlib.Path(__file__).with_name("machines.py")
SHARDED = pathlib.Path(__file__).with_name("sharded_on_machines.py")


def flags(node, address, port, ranks=2, nodes=2):
    return ["run", "-n", ranks, "--nnodes", nodes, "--node-rank", node, "--master-addr", address,
            "--master-port", port]  # fmt: skip


def ends(jobs, within_s=60):
    return [(job.communicate(timeout=within_s)[1], job.returncode) for job in jobs]


def test_launchers_on_three_addresses_make_one_job(launcher):
    port = launcher.reserve_port()
    jobs = [launcher.start(*flags(node, "127.0.0.11", port, nodes=3), PROGRAM,
                           env={"OWN_ADDRESS": f"127.0.0.{11 + node}"}) for node in range(3)]  # fmt: skip
    assert ends(jobs) == [("", 0)] * 3
    met = (launcher.folder / "met").read_text()
    assert met == "1@127.0.0.11 2@127.0.0.12 3@127.0.0.12 4@127.0.0.13 5@127.0.0.13"


def test_machines_with_different_numbers_of_ranks(launcher):
    port = launcher.reserve_port()
    jobs = []
    for node, (base, ranks) in enumerate([(0, 1), (1, 3)]):
        words = ["--world_size", 4, "--base_rank", base, "--node_rank", node]
        words += ["--master_addr", "127.0.0.1", "--master_port", port]
        jobs.append(launcher.start("run", "-n", ranks, *words, PROGRAM))
    assert ends(jobs) == [("", 0)] * 2
    assert (launcher.folder / "met").read_text() == "1@127.0.0.1 2@127.0.0.1 3@127.0.0.1"


def test_the_launcher_whose_rank_failed_says_so_and_the_others_end_as_theirs_do(launcher):
    port = launcher.reserve_port()
    jobs = [launcher.start(*flags(node, "127.0.0.1", port), PROGRAM, "fail") for node in range(2)]
    (first, code_0), (second, code_1) = ends(jobs)
    assert (first, code_0, code_1) == ("", 0, 9)
    assert second.startswith("lamina run: rank 3 failed: exit code 9\n")


def test_each_launcher_ends_its_own_ranks(launcher):
    """Two launchers on one machine: the death of one is nothing to the other's ranks."""
    jobs = [launcher.start(*flags(node, "127.0.0.1", 4711), "-c", "sh", "-c", READY + "exec sleep 100")
            for node in range(2)]  # fmt: skip
    eventually(lambda: len(list(launcher.folder.glob("ready-*"))) == 4 and len(launcher.processes()) == 8)
    jobs[1].kill()
    jobs[1].wait()
    eventually(lambda: len(launcher.processes()) == 4, within_s=1)
    jobs[0].terminate()
    assert jobs[0].wait(10) == 143


@pytest.mark.parametrize("listens_on", ["127.0.0.12", "0.0.0.0"])
def test_a_port_that_is_in_use_is_said_before_the_start(launcher, listens_on):
    with socket.create_server((listens_on, 0)) as server:
        port = server.getsockname()[1]
        result = launcher.run(*flags(0, "127.0.0.12", port), "-c", "touch", "started")
        assert (result.returncode, result.stderr) == (2, (
            f"lamina run: port {port} of 127.0.0.12 is in use already: give another --master_port, or end what "
            "listens there [run-port]\nmore: lamina explain run-port\n"
        ))  # fmt: skip
        assert not (launcher.folder / "started").exists()
        assert launcher.run(*flags(1, "127.0.0.12", port), "-c", "true").returncode == 0, "rank 0 is elsewhere"


@pytest.fixture
def namespaces():
    """Two machines of their own, as far as the network goes, joined by a cable: 10.77.0.1 and 10.77.0.2."""
    names = [f"lamina-{os.getpid()}-{side}" for side in "ab"]

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
            for number, name in enumerate(names, 1):
                ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error} {getattr(error, 'stderr', '')}")
        yield names


def test_launchers_in_network_namespaces_make_one_job(launcher, namespaces):
    jobs = [launcher.start("netns", "exec", name, command(), *flags(node, "10.77.0.1", 29500), PROGRAM,
                           binary=shutil.which("ip")) for node, name in enumerate(namespaces)]  # fmt: skip
    assert ends(jobs) == [("", 0)] * 2
    assert (launcher.folder / "met").read_text() == "1@10.77.0.1 2@10.77.0.2 3@10.77.0.2"


def test_a_sharding_group_on_two_machines_gathers_by_levels_and_trains_like_one_device(launcher, namespaces):
    """Each machine's own name is 127.0.1.1 to it, as Debian installs it, that of MASTER_ADDR among them: they listen
    where they reach each other."""
    jobs = []
    for node, name in enumerate(namespaces):
        hosts = launcher.folder / f"hosts-{node}"
        first = "127.0.1.1" if node == 0 else "10.77.0.1"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n{first} first-of-two\n")
        named = f"mount --bind {hosts} /etc/hosts && exec " + '"$@"'
        words = ["unshare", "-m", "sh", "-c", named, "sh", command(), *flags(node, "first-of-two", 29500)]
        words += [*PRELOAD_COMPILER, SHARDED]
        jobs.append(launcher.start("netns", "exec", name, *words, binary=shutil.which("ip")))
    (first, code_0), (second, code_1) = ends(jobs, within_s=200)
    assert (code_0, code_1) == (0, 0), first + second
    assert first.count('MASTER_ADDR is "first-of-two", which is 127.0.1.1 on its own machine') >= 1
    assert first.count("sharding over ranks 0-3, on several machines, gathers across them first, then within") == 1
    assert "gathers" not in second
