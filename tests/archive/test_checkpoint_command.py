# SPDX-License-Identifier: Apache-2.0
"""`lamina checkpoint`: what it prints, what it writes, and how it refuses."""

import json
import subprocess

import pytest
import torch
from archive.checkpoints import model, save
from launch.launcher_harness import command
from safetensors import safe_open
from safetensors.torch import load_file


@pytest.fixture
def checkpoint():
    def run(*words):
        arguments = [command(), "checkpoint", *map(str, words)]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=60)

    return run


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_inspect_prints_what_a_checkpoint_holds(checkpoint, tmp_path):
    about = {"layout": {"pp": 2}, "optimizers": [{"class": "AdamW", "groups": [{"lr": 0.1, "params": ["a", "b"]}]}]}
    folder = save(tmp_path, "step-10", model(), writers=3, about=about)
    result = checkpoint("inspect", folder)
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{folder}: 4 tensors in 3 files, ")
    assert 'layout: {"pp":2}' in lines
    assert 'optimizer: {"class":"AdamW","groups":[{"lr":0.1,"params":2}]}' in lines
    row = next(line for line in lines if line.startswith("h.0.weight")).split()
    assert row[:7] == ["h.0.weight", "parameter", "float32", "(700,", "500)", "1400000", "3"]
    assert " ".join(row[7:]) == "model-00001.safetensors and 2 more"
    data = json.loads(checkpoint("inspect", tmp_path, "step-10", "--json").stdout)
    assert data["tag"] == "step-10" and data["about"] == about
    assert [tensor["shape"] for tensor in data["tensors"]] == [[700, 500], [500], [33, 7], [3, 4]]


def test_names_with_control_characters_are_printed_harmless_and_on_one_line(checkpoint, tmp_path):
    one = save(tmp_path, "a", {"odd\n\x1b[31mname": torch.ones(3)}, number=1)
    other = save(tmp_path, "b", {"odd\n\x1b[31mname": torch.zeros(3)}, number=2)
    shown = "odd\\x0a\\x1b[31mname"
    assert any(line.startswith(f"{shown} ") for line in checkpoint("inspect", one).stdout.splitlines())
    assert checkpoint("diff", one, other).stdout.startswith(f"{shown}: 3 of 3 elements")
    data = next(one.glob("*.safetensors"))
    flip(data, data.stat().st_size - 1)
    assert f"in it lies {shown}\n" in checkpoint("verify", one).stdout
    result = checkpoint("merge", one, tmp_path / "out")
    assert result.returncode == 2 and f"({shown})" in result.stderr
    assert result.stderr.endswith("\nmore: lamina explain checkpoint-damaged\n") and result.stderr.count("\n") == 2


@pytest.mark.parametrize("odd", ["\x1b[31mred\a", "\u009b31m", "two\nlines", "\udc9b no UTF-8", "\u202egnp"])
def test_no_command_prints_the_name_of_a_folder_as_a_terminal_would_obey_it(checkpoint, tmp_path, odd):
    folder = tmp_path / odd
    plain = (save(folder, str(number), {"w": torch.ones(3)}, number=number) for number in (1, 2))
    one, two = (place.rename(folder / f"{odd}{place.name}") for place in plain)
    tag = f"{odd}1"
    calls = [
        ("inspect", folder), ("inspect", folder, "--json"), ("inspect", folder, tag), ("inspect", one, "--json"),
        ("inspect", folder, "none"), ("verify", folder), ("verify", folder, tag, "--json"), ("diff", one, two),
        ("diff", one, f"{odd} is not there"), ("merge", folder, folder / "out"), ("merge", folder, folder / "out"),
        ("reshard", one, folder / "r", "--files", 2), ("reshard", folder, folder / "r", "--files", 0),
        ("convert", folder, folder / "c"), ("convert", folder, "--tag", odd), ("prune", folder, "--keep", 1),
        ("prune", f"{odd} is not there", "--keep", 1), (odd,), ("inspect", "--" + odd),
    ]  # fmt: skip
    for words in calls:
        result = checkpoint(*words)
        for line in (result.stdout + result.stderr).split("\n"):
            assert line.isprintable(), (words, line)
        assert words[-1] != "--json" or json.loads(result.stdout)
        # The bars of progress are for terminals alone, so no call has more lines than it has to say.
        assert "lines" not in odd or not (result.stdout + result.stderr).count("\nlines"), words


def test_a_path_may_be_the_file_newest_and_no_other_file(checkpoint, tmp_path):
    folder = save(tmp_path, "a", {"w": torch.ones(3)})
    assert checkpoint("inspect", tmp_path / "newest").stdout.splitlines()[1].split()[:2] == ["*", "a"]
    assert checkpoint("verify", tmp_path / "newest").stdout.startswith(str(folder))
    for word in ("inspect", "verify"):
        result = checkpoint(word, folder / "manifest.json")
        assert result.returncode == 2 and "is a file: give the folder that it is in" in result.stderr


def test_merge_says_how_many_elements_a_dtype_is_too_small_for(checkpoint, tmp_path):
    save(tmp_path, "a", {"w": torch.tensor([1e30, 2.0, float("inf"), -7e4])})
    said = checkpoint("merge", tmp_path, tmp_path / "half", "--dtype", "float16").stdout
    assert said.splitlines()[1:] == ["2 elements are too large for float16 and infinite there"]
    assert len(checkpoint("merge", tmp_path, tmp_path / "b", "--dtype", "bfloat16").stdout.splitlines()) == 1


def test_inspect_of_a_folder_marks_the_newest_and_the_damaged(checkpoint, tmp_path):
    for number, tag in enumerate("abc", 1):
        save(tmp_path, tag, {"w": torch.ones(3)}, number=number)
    (tmp_path / "a_partial/model-00001.safetensors").unlink()
    rows = json.loads(checkpoint("inspect", tmp_path, "--json").stdout)
    assert [(row["tag"], row["newest"], "damage" in row) for row in rows] == [
        ("c", True, False), ("b", False, False), ("a", False, True)
    ]  # fmt: skip
    lines = checkpoint("inspect", tmp_path).stdout.splitlines()
    assert lines[1].split() == ["*", "c", "3", "the", "newest"]
    assert "damaged: opening " in lines[3]


def test_verify_names_file_and_tensor_of_what_is_damaged(checkpoint, tmp_path):
    folder = save(tmp_path, "a", model(), writers=2)
    whole = checkpoint("verify", folder)
    assert whole.returncode == 0 and "all as they were written" in whole.stdout
    file = folder / "model-00002.safetensors"
    flip(file, file.stat().st_size - 1)
    result = checkpoint("verify", tmp_path)
    assert result.returncode == 1
    assert result.stdout.startswith(f"{file}: ") and "are not those that were written; in it lies" in result.stdout
    damage = json.loads(checkpoint("verify", tmp_path, "--json").stdout)["damage"]
    assert [each["file"] for each in damage] == [file.name] and damage[0]["tensors"]


def test_diff_names_tensors_and_the_largest_difference(checkpoint, tmp_path):
    tensors = model()
    one = save(tmp_path / "one", "a", tensors, about={"counters": {"step": 1}})
    same = save(tmp_path / "same", "a", tensors, writers=3, about={"counters": {"step": 1}})
    result = checkpoint("diff", one, same)
    assert (result.returncode, result.stdout) == (0, "")
    tensors["h.0.bias"][7] += 0.5
    other = save(tmp_path / "other", "a", tensors, about={"counters": {"step": 2}})
    result = checkpoint("diff", one, other)
    assert result.returncode == 1
    assert result.stdout.splitlines() == [
        "h.0.bias: 1 of 500 elements, by 0.5 at most", "about/counters/step: 1 and 2"
    ]  # fmt: skip
    rows = json.loads(checkpoint("diff", one, other, "--json").stdout)
    assert rows[0]["elements"] == 1 and rows[0]["largest"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("writers", [1, 4])
def test_safetensors_reads_what_merge_writes(checkpoint, tmp_path, writers):
    tensors = model()
    save(tmp_path, "a", tensors, writers=writers, about={"translations": [["h.", "transformer.h."]]})
    result = checkpoint("merge", tmp_path, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    merged = load_file(tmp_path / "out/model.safetensors")
    assert merged.keys() == {f"transformer.{name}" for name in tensors}
    for name, tensor in tensors.items():
        assert torch.equal(merged[f"transformer.{name}"], tensor)
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_merge_converts_as_torch_does(checkpoint, tmp_path, name):
    wide = torch.cat([torch.randn(100_000) * 10.0**e for e in range(-9, 9)])
    tensors = {
        "w": wide,
        "half": wide.to(torch.float16),
        "b": wide.to(torch.bfloat16),
        "d": wide.double(),
        "i": torch.arange(5),
    }
    save(tmp_path, "a", tensors)
    assert checkpoint("merge", tmp_path, tmp_path / "out", "--dtype", name).returncode == 0
    merged = load_file(tmp_path / "out/model.safetensors")
    for key, tensor in tensors.items():
        expected = tensor.to(getattr(torch, name)) if tensor.is_floating_point() else tensor
        assert merged[key].dtype == expected.dtype and torch.equal(merged[key], expected), key


def test_a_merged_model_gives_the_same_logits(checkpoint, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=101, n_positions=16)
    net = GPT2LMHeadModel(config).eval()
    state = {f"model.{name}": tensor for name, tensor in net.state_dict().items() if name != "lm_head.weight"}
    about = {"translations": [["model.", ""]]}
    save(tmp_path, "a", state, writers=3, about=about, extra={"config.json": config.to_json_string()})
    assert checkpoint("merge", tmp_path, tmp_path / "out").returncode == 0
    merged = GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(12)[None]
    assert torch.equal(net(tokens).logits, merged(tokens).logits)


def test_reshard_keeps_all_and_safetensors_reads_its_files(checkpoint, tmp_path):
    tensors = model()
    folder = save(tmp_path, "a", tensors, writers=3, extra={"config.json": "{}"})
    result = checkpoint("reshard", folder, tmp_path / "out", "--files", 2)
    assert result.returncode == 0, result.stderr
    made = tmp_path / "out/a_partial"
    files = [load_file(made / f"model-0000{i}.safetensors") for i in (1, 2)]
    for name, tensor in tensors.items():
        assert torch.equal(torch.cat([file[name] for file in files]), tensor.reshape(-1))
    assert checkpoint("diff", folder, made).returncode == 0
    assert checkpoint("verify", tmp_path / "out").returncode == 0
    again = checkpoint("reshard", folder, tmp_path / "out", "--files", 2)
    assert again.returncode == 2 and "has a checkpoint a already" in again.stderr


def test_prune_keeps_the_latest(checkpoint, tmp_path):
    for number, tag in enumerate("abcd", 1):
        save(tmp_path, tag, {"w": torch.ones(3)}, number=number)
    result = checkpoint("prune", tmp_path, "--keep", 2)
    assert (result.returncode, result.stdout) == (0, "removed b\nremoved a\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c_partial", "d_partial", "newest"]
    assert checkpoint("prune", tmp_path, "--keep", 0).returncode == 2


def hostile(tmp_path, **changes):
    return save(tmp_path, "a", {"w": torch.ones(8)}, changes=changes)


def test_hostile_manifests_are_refused_with_one_line(checkpoint, tmp_path):
    piece = {"file": 0, "begin": 0}
    tensor = {"name": "w", "kind": "parameter", "dtype": "uint8", "shape": [8], "pieces": [piece]}
    passwords = [{"name": "../../etc/passwd", "bytes": 5, "checksums": "0" * 16}]
    cases = {
        "leaves": ({"files": passwords}, "is no name of a file in a checkpoint"),
        "overlaps": ({"tensors": [tensor, {**tensor, "name": "v"}]}, "lie in the same bytes"),
        "huge": ({"tensors": [{**tensor, "shape": [1 << 59, 8]}]}, "2^60"),
        "beyond": ({"tensors": [{**tensor, "shape": [1 << 40]}]}, "are not in model-00001.safetensors"),
        "strange": ({"tensors": [{**tensor, "more": 1}]}, "more"),
        "number": ({"number": -1}, "number"),
    }
    for name, (changes, words) in cases.items():
        folder = hostile(tmp_path / name, **changes)
        for sub in (["inspect", folder], ["verify", folder], ["merge", folder, tmp_path / "out"]):
            result = checkpoint(*sub)
            assert result.returncode == 2 and words in result.stderr, (name, sub, result)
            assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_link_in_the_place_of_a_file_is_refused(checkpoint, tmp_path):
    folder = hostile(tmp_path)
    file = folder / "model-00001.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    result = checkpoint("inspect", folder)
    assert result.returncode == 2 and f"{file}: a link" in result.stderr


def test_what_is_not_there_is_said_with_what_is(checkpoint, tmp_path):
    save(tmp_path, "a", {"w": torch.ones(3)})
    result = checkpoint("merge", tmp_path, tmp_path / "out", "--tag", "b")
    assert result.returncode == 2 and result.stderr.endswith("here are a\n")
    result = checkpoint("inspect", tmp_path / "nothing")
    assert result.returncode == 2 and "no checkpoint, and no folder of checkpoints" in result.stderr
    assert checkpoint("unknown").returncode == 2
    assert "merge" in checkpoint("--help").stdout


def test_a_path_that_cannot_be_looked_at_is_an_error_of_one_line(checkpoint, tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for path in (loop, tmp_path / ("x" * 300)):
        for words in (("inspect", path), ("verify", path), ("merge", path, tmp_path / "out")):
            result = checkpoint(*words)
            assert result.returncode == 2 and result.stderr.count("\n") == 1, result
