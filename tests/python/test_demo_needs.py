# SPDX-License-Identifier: Apache-2.0
"""`make demo` on a new machine installs what the demo needs, and nothing that only tests do."""

import os
import subprocess

from docs.raised import ROOT

OF_TESTS = {"libgtest-dev", "libgmock-dev", "librapidcheck-dev", "gdb", "iproute2"}


def installed(tmp_path, *words):
    """The Debian packages that scripts/system.sh installs where there are none."""
    for name, text in {
        "dpkg-query": "exit 1",
        "apt-get": f'echo "$@" >>{tmp_path}/told',
        "sudo": 'shift; exec "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "LAMINA_SKIP_PACKAGES"}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    subprocess.run([ROOT / "scripts/system.sh", *words], env=env, check=True, capture_output=True)
    return set((tmp_path / "told").read_text().splitlines()[-1].split())


def steps_of(target):
    """The commands of that target where nothing has been made yet."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "TORCH")}
    run = subprocess.run(["make", "-nB", target], cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    return run.stdout


def test_only_tests_ask_for_their_packages(tmp_path):
    packages = installed(tmp_path)
    assert {"g++", "cmake", "libssl-dev"} <= packages and not packages & OF_TESTS
    assert installed(tmp_path, "tests") >= packages | OF_TESTS


def test_the_demo_makes_nothing_of_tests():
    demo = steps_of("demo")
    assert "scripts/system.sh\n" in demo and "scripts/package.sh" in demo
    words = ("system.sh tests", "LAMINA_TESTS=ON", "requirements-dev.txt", "requirements-docs.txt")
    assert not [each for each in words if each in demo]
    tests = steps_of("build-tests")
    assert [each for each in words if each in tests] == list(words[:3])
