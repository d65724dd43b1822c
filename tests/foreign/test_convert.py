# SPDX-License-Identifier: Apache-2.0
"""`lamina checkpoint convert`: checkpoints of torch's own, read without executing what they hold."""

import argparse
import collections
import pickle
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch.launcher_harness import command, require_success
from safetensors.torch import load_file


@pytest.fixture
def convert(tmp_path):
    def run(path, *options):
        words = [command(), "checkpoint", "convert", str(path), str(tmp_path / "out"), *options]
        return subprocess.run(words, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def converted(tmp_path):
    return lambda: load_file(tmp_path / "out/converted_partial/model-00001.safetensors")


def tensors():
    torch.manual_seed(0)
    w = torch.randn(40, 30)
    return {
        "w": w, "rows": w[3:7], "half": w.half(), "b": w.bfloat16(), "d": w.double(), "i": torch.arange(7),
        "small": torch.arange(5, dtype=torch.int8), "flag": torch.tensor([True, False]), "one": torch.tensor(2.5),
        "none": torch.empty(0, 3), "u": torch.tensor([0, 1, 65535], dtype=torch.uint16),
        "f8": torch.ones(4).to(torch.float8_e4m3fn),
    }  # fmt: skip


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.double(), other.double())


def test_a_file_of_torch_save_is_converted(convert, converted, tmp_path):
    state = tensors()
    parameters = {"p": torch.nn.Parameter(torch.randn(3)), "q": {"r": torch.ones(2)}, "step": 3, "name": "adam"}
    torch.save({"model": state, "rest": parameters}, tmp_path / "x.pt")
    result = convert(tmp_path / "x.pt")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1] == "left: rest.step rest.name"
    found = converted()
    assert found.keys() == {f"model.{name}" for name in state} | {"rest.p", "rest.q.r"}
    for name, tensor in state.items():
        assert same(found[f"model.{name}"], tensor), name
    assert same(found["rest.p"], parameters["p"].detach())
    verified = subprocess.run([command(), "checkpoint", "verify", str(tmp_path / "out")], timeout=60)
    assert verified.returncode == 0


def test_a_state_dict_is_converted_with_tied_tensors_once(convert, converted, tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    net[1].weight = net[0].weight
    torch.save(net.state_dict(), tmp_path / "pytorch_model.bin")
    result = convert(tmp_path / "pytorch_model.bin", "--prefix", "")
    assert result.returncode == 0, result.stderr
    found = converted()
    assert found.keys() == net.state_dict().keys() - {"1.weight"}
    assert all(same(tensor, net.state_dict()[name]) for name, tensor in found.items())


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_is_converted(convert, converted, tmp_path):
    state = {name: tensor for name, tensor in tensors().items() if name != "none"}
    dcp.save({"model": state, "opt": {"step": 3}}, checkpoint_id=tmp_path / "dcp")
    result = convert(tmp_path / "dcp", "--prefix", "model.")
    assert result.returncode == 0, result.stderr
    assert "left: opt.step" in result.stdout
    found = converted()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert same(found[name], tensor), name


WRITE = Path(__file__).with_name("write_distributed.py")
RESUME = f"""
import sys
sys.path.insert(0, {str(WRITE.parent)!r})
import torch
import lamina
from write_distributed import Net, groups

lamina.init()
model = lamina.DistributedModel(Net())
optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(groups(model.module)))
lamina.resume_from_checkpoint(sys.argv[1])
expected = torch.load(sys.argv[2], weights_only=False)
found = model.state_dict()
assert found.keys() == expected["model"].keys()
assert all(torch.equal(found[name], value) for name, value in expected["model"].items())
names = [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]
names.sort(key=lambda name: model.module.get_parameter(name).dim() == 1)  # in the order of the groups
state = optimizer.state_dict()
for number, name in enumerate(names):
    for key, value in expected["optim"]["state"][name].items():
        assert torch.equal(state["state"][number][key], value), (name, key)
assert [group["lr"] for group in state["param_groups"]] == [0.01, 0.02]
lamina.shutdown()
"""


@pytest.mark.parametrize("mode", ["fsdp", "tp", "flat"])
def test_what_two_ranks_saved_is_converted_and_resumed_with_the_optimizer(launcher, convert, converted, tmp_path, mode):
    """Shards of rows and of columns, by FSDP2 and by tensor parallelism."""
    require_success(launcher.start_ranks(2, WRITE, mode, tmp_path / "dcp"))
    assert {file.name[:4] for file in (tmp_path / "dcp").glob("*.distcp")} == {"__0_", "__1_"}
    result = convert(tmp_path / "dcp", "--prefix", "model.")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1:] == ["left: extra.step"]
    expected, found = torch.load(tmp_path / "dcp.pt", weights_only=False)["model"], converted()
    assert found.keys() == expected.keys()
    assert all(same(found[name], value) for name, value in expected.items())
    (resume := tmp_path / "resume.py").write_text(RESUME)
    require_success(launcher.start_ranks(1, resume, tmp_path / "out", tmp_path / "dcp.pt"))
    result = convert(tmp_path / "dcp", "--tag", "named")
    assert "24 states of optimizers, whose parameters have other names: give --prefix" in result.stdout


def test_a_flipped_bit_is_found_and_the_tensor_named(convert, tmp_path):
    w = torch.randn(100)
    for name, write in {
        "x.pt": lambda place: torch.save({"a": torch.ones(3), "w": w}, place),
        "dcp": lambda place: dcp.save({"a": torch.ones(3), "w": w}, checkpoint_id=place),
    }.items():
        write(tmp_path / name)
        file = tmp_path / name if name == "x.pt" else tmp_path / name / "__0_0.distcp"
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[whole.index(w.numpy().tobytes()) + 200] ^= 1
        file.write_bytes(damaged)
        result = convert(tmp_path / name)
        assert result.returncode == 2 and f"{file}: w: its elements are damaged" in result.stderr
        assert convert(tmp_path / name, "--no-verify", "--tag", name).returncode == 0
    torch.save({"w": w}, tmp_path / "x.pt")
    damaged = bytearray((tmp_path / "x.pt").read_bytes())
    damaged[damaged.index(b"torch._utils") + 3] ^= 1
    (tmp_path / "x.pt").write_bytes(damaged)
    result = convert(tmp_path / "x.pt")
    assert result.returncode == 2 and "data.pkl" in result.stderr and "damaged" in result.stderr


def of_the_original(folder, content, shards=2):
    """The files of a sharded checkpoint, by the specification, of a module without its parameters' elements."""
    place = folder / "ten_partial"
    place.mkdir(parents=True)
    (folder / "newest").write_text("ten_partial")
    torch.manual_seed(1)
    groups = [{"a.w": torch.randn(3, 5), "odd.name/é": torch.randn(7)}, {"b": torch.randn(())}]
    module = {name: torch.empty(0) for group in groups for name in group} | {"count": torch.tensor(3)}
    torch.save({"module": module, "rest": 5}, place / "model_0.pt")
    for rank in range(shards):
        flat = []
        for group in groups:
            parts = []
            for value in group.values():
                size = -(-value.numel() // shards)
                part = value.reshape(-1)[rank * size : (rank + 1) * size]
                parts.append(torch.nn.functional.pad(part, (0, size - part.numel())))
            flat.append(torch.cat(parts))
        torch.save({"partition_count": shards, "fp32_flat_groups": flat}, place / f"optimizer_0_0_{rank}.pt")
    shapes = [{name: value.shape for name, value in group.items()} for group in groups]
    content = {"buffer_names": ["count"], "param_shapes": shapes, **content}
    torch.save(content, place / "user_content.pt")
    return place, groups[0] | groups[1] | {"count": torch.tensor(3)}


def test_parameters_are_cut_out_of_the_flat_groups_of_the_original(convert, converted, tmp_path):
    content = {"args": argparse.Namespace(lr=1), "table": collections.defaultdict(list, {"a": [1]}), "set": {1, 2}}
    place, expected = of_the_original(tmp_path / "theirs", content, shards=3)
    result = convert(tmp_path / "theirs")
    assert result.returncode == 0, result.stderr
    found = converted()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert same(found[name], value), name
    (place / "optimizer_0_0_1.pt").unlink()
    result = convert(place, "--tag", "other")
    assert result.returncode == 2 and "optimizer_0_0_1.pt: the checkpoint has no such file" in result.stderr


def test_content_that_is_no_data_is_left_and_shapes_that_do_not_fit_are_refused(convert, tmp_path):
    place, _ = of_the_original(tmp_path / "theirs", {"param_shapes": [{"a.w": torch.Size([300, 5])}, {}]})
    result = convert(place)
    assert result.returncode == 2 and "has not the elements that param_shapes says" in result.stderr
    (place / "user_content.pt").write_bytes(b"PK\3\4 nothing")
    result = convert(place)
    assert result.returncode == 0, result.stderr
    assert "user_content (" in result.stdout and "no param_shapes say" in result.stdout


def test_slices_and_folders_of_others_are_refused_with_what_to_do(convert, tmp_path):
    place = tmp_path / "t_partial"
    place.mkdir()
    result = convert(place)
    assert result.returncode == 2 and "neither .metadata" in result.stderr
    for slice_ in range(2):
        torch.save({"w": torch.ones(2)}, place / f"model_0_{slice_}.pt")
    result = convert(place)
    assert result.returncode == 2 and "tensor parallelism" in result.stderr


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_hostile_pickle_is_refused_naming_what_it_would_call_and_nothing_is_executed(convert, tmp_path):
    mark = tmp_path / "executed"
    torch.save({"w": torch.ones(2), "evil": Hostile(mark)}, tmp_path / "x.pt")
    result = convert(tmp_path / "x.pt")
    assert result.returncode == 2
    assert result.stderr.startswith(f"lamina checkpoint convert: {tmp_path / 'x.pt'}: the pickle names io.open, ")
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(mark)))
    result = convert(folder)
    assert result.returncode == 2 and "the pickle names io.open" in result.stderr
    assert not mark.exists()


def test_files_that_are_none_of_torchs_are_refused_with_one_line(convert, tmp_path):
    torch.save(torch.ones(3), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"0" * 1000)
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("x/readme", b"")
    torch.save({"w": torch.ones(3, 4).t()}, tmp_path / "transposed.pt")
    torch.save({"w": torch.ones(1000)}, tmp_path / "x.pt")
    (tmp_path / "short.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:-500])
    words = {
        "old.pt": "has no directory", "packed.pt": "it is compressed", "other.pt": "no data.pkl",
        "transposed.pt": "w: its elements do not lie row by row", "short.pt": "no zip archive",
    }  # fmt: skip
    for name, expected in words.items():
        result = convert(tmp_path / name)
        assert result.returncode == 2 and expected in result.stderr, (name, result)
        assert result.stderr.count("\n") == 1
    result = convert(tmp_path / "x.pt", "--prefix", "model.")
    assert result.returncode == 2 and 'no tensor\'s name begins with "model."; some are w' in result.stderr
