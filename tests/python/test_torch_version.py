# SPDX-License-Identifier: Apache-2.0
"""The engine for the torch that is installed. The wheel's test sees a whole package refuse another torch."""

import pytest

from lamina.torch_version import _engine_folder


@pytest.fixture
def package(tmp_path):
    for name in ("torch2.9", "torch2.13", "torch2.14", "torch_patches"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cu130", "2.13.0a0+git1234"])
def test_the_engine_of_the_minor_version_is_taken(package, version):
    assert _engine_folder([str(package / "none"), str(package)], version) == str(package / "torch2.13")


def test_another_torch_is_told_which_it_takes(package):
    with pytest.raises(ImportError) as told:
        _engine_folder([str(package)], "2.15.0+cpu")
    assert str(told.value) == (
        "this lamina was built for torch 2.9 and 2.13 and 2.14, and 2.15.0+cpu is installed: "
        "pip install 'torch>=2.9,<2.15', or take lamina's wheel for torch 2.15"
    )


def test_no_torch_is_told_which_to_install(package):
    with pytest.raises(ImportError, match=r"and none is installed: pip install 'torch>=2\.9,<2\.15'$"):
        _engine_folder([str(package)], None)


def test_a_package_without_an_engine_says_so(tmp_path):
    with pytest.raises(ImportError, match="has no engine: run `make build`, or install its wheel"):
        _engine_folder([str(tmp_path)], "2.13.0")
