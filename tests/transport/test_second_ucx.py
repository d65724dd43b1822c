# SPDX-License-Identifier: Apache-2.0
"""A second UCX beside the one that is found first: that of PyPI, which `make test-ucx` brings, or a copy of the first.
Modules of one version and libraries of the other end a process with signal 11."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from launch.launcher_harness import ROOT, built
from soak import SOAK

FOLDERS = sorted(ROOT.glob("build/ucx/libucx/lib"))
SYSTEM = [library.parent for library in Path("/usr/lib").glob("*/libucp.so.0")]

needs_two = pytest.mark.skipif(not FOLDERS or not SYSTEM, reason="`make test-ucx` brings a second UCX")


def run(filter, environment):
    words = [built("bin/ucx_test"), f"--gtest_filter={filter}"]
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0 and "[  PASSED  ]" in done.stdout, done.stdout + done.stderr
    return done.stderr


@needs_two
def test_ranks_talk_over_it():
    listed = subprocess.check_output([built("bin/ucx_test"), "--gtest_list_tests"], text=True).splitlines()
    suites = [line.split("#")[0].strip() for line in listed if line and not line.startswith(" ")][1:]
    chosen = suites if SOAK else random.Random(1).sample(suites, 2)
    run(":".join(f"{suite}*" for suite in chosen), {"LAMINA_UCX": str(FOLDERS[0])})


@needs_two
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "without_modules"])
def test_the_systems_modules_are_not_taken_for_its_own(whole, tmp_path):
    libraries = FOLDERS[0] if whole else copy(FOLDERS[0], tmp_path)
    environment = {"LAMINA_UCX": str(libraries), "UCX_MODULE_DIR": str(SYSTEM[0] / "ucx")}
    said = run("UcxModules.AreThoseBesideTheLibraries:Ucx.TwoRanksExchangeTensorsOfAllSizes", environment)
    assert f"UCX_MODULE_DIR={SYSTEM[0]}/ucx is not heeded" in said
    assert whole == (f"there is no folder {libraries}/ucx" not in said)


@pytest.mark.skipif(not SYSTEM, reason="the system has no UCX")
def test_libraries_that_the_linker_finds_take_their_own_modules(tmp_path):
    libraries = copy(SYSTEM[0], tmp_path)
    said = run("UcxModules.AreThoseBesideTheLibraries", {"LD_LIBRARY_PATH": str(libraries), "LAMINA_UCX": ""})
    assert f"there is no folder {libraries}/ucx" in said


def copy(libraries, folder):
    for library in libraries.glob("libuc?.so.0"):
        shutil.copy(library, folder)
    return folder
