# SPDX-License-Identifier: Apache-2.0
"""Objects in files, with one rank; several are in tests/multiprocess."""

import argparse
import os
import pathlib
import pickle
import resource
import signal
import zipfile

import pytest
import torch

import lamina
import smdistributed.modelparallel.torch as smp

OBJECT = {"tensor": torch.arange(1000.0), "arguments": argparse.Namespace(lr=0.1), "list": [1, (2, None)]}


def same(loaded):
    assert torch.equal(loaded["tensor"], OBJECT["tensor"])
    assert loaded["arguments"] == OBJECT["arguments"] and loaded["list"] == OBJECT["list"]


@pytest.fixture
def path(start, tmp_path):
    return str(tmp_path / "checkpoint.pt")


def names(path):
    return sorted(os.listdir(os.path.dirname(path)))


@pytest.mark.parametrize(
    "options, name",
    [
        ({}, "checkpoint.pt_0"),
        ({"partial": True}, "checkpoint.pt_0"),
        ({"partial": True, "v3": True}, "checkpoint.pt_0_0_0"),
        ({"partial": False}, "checkpoint.pt"),
    ],
)
def test_an_object_goes_there_and_back(path, options, name):
    smp.save(OBJECT, path, **options)
    assert names(path) == [name]
    same(smp.load(path, **options))
    same(torch.load(os.path.join(os.path.dirname(path), name), weights_only=False))


def test_arguments_of_torch_are_passed_on(path):
    smp.save(OBJECT, path, partial=False, pickle_module=pickle, pickle_protocol=3)
    assert smp.load(path, map_location="meta", partial=False)["tensor"].is_meta
    assert smp.load(path, lambda storage, _: storage, pickle, partial=False, encoding="utf-8")["list"] == OBJECT["list"]
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        smp.load(path, partial=False, weights_only=True)
    smp.save({"w": torch.ones(2)}, path, partial=False)
    assert torch.equal(smp.load(path, partial=False, weights_only=True, mmap=True)["w"], torch.ones(2))


def test_a_file_of_torch_is_loaded(path):
    torch.save(OBJECT, path)
    same(smp.load(path, partial=False))
    torch.save(OBJECT, path + "_0", _use_new_zipfile_serialization=False)
    same(smp.load(path, back_compat=True))


class Unwritable:
    def __reduce__(self):
        raise ValueError("I am not to be saved")


def test_what_fails_leaves_the_old_file_and_nothing_else(path):
    smp.save(OBJECT, path)
    with pytest.raises(ValueError, match="not to be saved"):
        smp.save([torch.ones(1000), Unwritable()], path)
    assert names(path) == ["checkpoint.pt_0"]
    same(smp.load(path))


class Kills:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_while_saving_leaves_the_old_file_and_the_next_save_cleans_up(path):
    smp.save(OBJECT, path)
    if (killed := os.fork()) == 0:
        smp.save([torch.ones(1000), Kills()], path)
    assert os.WTERMSIG(os.waitpid(killed, 0)[1]) == signal.SIGKILL
    assert names(path) == ["checkpoint.pt_0", "checkpoint.pt_0.0.tmp"]
    same(smp.load(path))
    smp.save(OBJECT, path)
    assert names(path) == ["checkpoint.pt_0"]


def test_the_file_is_on_the_disk_before_it_has_its_name(path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("name"), replace(*paths)))
    smp.save(OBJECT, path)
    assert done == ["sync", "name", "sync"]


def test_a_full_disk_says_which_file_and_leaves_the_old_one(path):
    smp.save(OBJECT, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"save\(\) on rank 0 cannot write: File too large: '.*checkpoint.pt_0'"):
            smp.save(torch.ones(100000), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(path) == ["checkpoint.pt_0"]
    same(smp.load(path))


@pytest.mark.parametrize("size", [0, 1, 10, 1000, 4000, -1, -30])
def test_a_file_that_was_cut_off_says_so(path, size):
    smp.save(OBJECT, path)
    file = pathlib.Path(path + "_0")
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(lamina.FormatError, match=r"checkpoint.pt_0 \(\d+ bytes\) .* cut off or damaged"):
        smp.load(path)


def test_a_file_with_a_wrong_byte_says_so(path):
    smp.save(OBJECT, path)
    file = pathlib.Path(path + "_0")
    with zipfile.ZipFile(file) as archive:
        place = archive.getinfo("archive/data/0").header_offset + 2000
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(lamina.FormatError, match="The checksum of archive/data/0 is wrong"):
        smp.load(path)


def test_something_else_is_no_file_of_save(path):
    pathlib.Path(path).write_text("hello, world")
    with pytest.raises(lamina.FormatError, match=r"checkpoint.pt \(12 bytes\)"):
        smp.load(path, partial=False)


def test_a_file_that_is_not_there_says_what_is(path):
    with pytest.raises(FileNotFoundError, match=r"there is no such file: '.*checkpoint.pt_0'"):
        smp.load(path)
    smp.save(OBJECT, path)
    with pytest.raises(FileNotFoundError, match=r"checkpoint.pt_0: load partial files with partial=True"):
        smp.load(path, partial=False)
    os.rename(path + "_0", path)
    with pytest.raises(FileNotFoundError, match=r"checkpoint.pt itself: load it with partial=False"):
        smp.load(path)
    with pytest.raises(FileNotFoundError, match=r"save.. on rank 0 cannot write: No such file"):
        smp.save(OBJECT, path + "-no/such")


@pytest.mark.parametrize("function", [lambda f: smp.save(OBJECT, f), smp.load])
def test_only_names_are_taken(start, tmp_path, function):
    with open(tmp_path / "file", "w+b") as file, pytest.raises(lamina.UsageError, match="name of a file, not Buffered"):
        function(file)


def test_without_init(tmp_path):
    with pytest.raises(lamina.UsageError, match="init"):
        lamina.save(OBJECT, str(tmp_path / "x"))


def test_inside_a_step(path):
    @lamina.step
    def step():
        smp.save(OBJECT, path)

    with pytest.raises(lamina.UsageError, match="inside a step"):
        step()
