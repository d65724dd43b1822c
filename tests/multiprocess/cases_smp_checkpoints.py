# SPDX-License-Identifier: Apache-2.0
"""Cases for four ranks: checkpoints as scripts for smdistributed.modelparallel save, read and resume them."""

import copy
import itertools
import math
import os
import pathlib
import re
import subprocess
from collections import OrderedDict

import pytest
import torch
from launch.launcher_harness import command
from multiprocess.cases_checkpoints import (
    ROWS,
    VOCABULARY,
    Job,
    Net,
    adamw,
    folder,
    fused,
    lamb,
    require_same,
    sgd,
)
from multiprocess.trainer_calls import require_resumed
from soak import some
from torch import nn

import lamina
import smdistributed.modelparallel.torch as smp

SEEDED = {"seed": 5}  # so that dropout goes on: this form has no generators


class Arguments:
    """An object of a class of their own, as scripts keep it in their user_content."""

    def __init__(self, lr):
        self.lr = lr

    def __eq__(self, other):
        return type(other) is Arguments and self.lr == other.lr


def require_going_on(layout, make=adamw, **keys):
    """Training that is saved, ended and resumed is the one that was not."""
    with folder() as path:
        job = Job(layout, make, **SEEDED, **keys)
        job.train(3)
        smp.save_checkpoint(path, "three", model=job.model, optimizer=job.optimizer, user_content=Arguments(0.5))
        expected = job.train(3), job.states()
        lamina.shutdown()

        job = Job(layout, make, **SEEDED, **keys)
        assert smp.resume_from_checkpoint(path) == Arguments(0.5)
        job.steps = 3
        found = job.train(3), job.states()
        require_same(found, expected)
        lamina.shutdown()


def names(path):
    """The files of the checkpoint "t", without lamina's own; on every rank."""
    lamina.barrier()
    return sorted(set(os.listdir(path / "t_partial")) - {"manifest.json"})


def saved_names(layout, **keys):
    with folder() as path:
        job = Job(layout, **keys)
        job.train(1)
        smp.save_checkpoint(path, "t")
        found = names(path)
        lamina.shutdown()
        return found


def merged(path):
    """The whole state of sharded files, in float32: as merging scripts put it together, which know nothing else of
    them."""
    place = path / (path / "newest").read_text().strip()
    files = sorted(place.glob("optimizer_*.pt"), key=lambda file: [int(n) for n in re.findall(r"\d+", file.name)])
    parts = [torch.load(file, weights_only=False) for file in files]
    count = parts[0]["partition_count"]
    assert count == len(files)
    flat = [torch.cat([group.float() for group in part["fp32_flat_groups"]]) for part in parts]
    content = torch.load(place / "user_content.pt", weights_only=False)
    module = torch.load(place / "model_0.pt", weights_only=False)["module"]
    state = OrderedDict((name, module[name]) for name in content["buffer_names"])
    at = 0
    for shapes in content["param_shapes"]:
        for name, shape in shapes.items():
            size = math.ceil(shape.numel() / count)
            whole = torch.cat([each.narrow(0, at, size) for each in flat])
            state[name] = whole.narrow(0, 0, shape.numel()).view(shape)
            at += size
    assert at == flat[0].numel()
    return state


def require_merges(layout, **keys):
    """Merged files are the model, and its masters where it has them."""
    with folder() as path:
        job = Job(layout, **keys)
        job.train(2)
        smp.save_checkpoint(path, "t", user_content={"arguments": Arguments(1)})
        state, optimizer = job.model.state_dict(), job.optimizer.state_dict()
        found = merged(path)
        trained = [name for name, parameter in job.model.module.named_parameters() if parameter.requires_grad]
        buffers = [name for name, _ in job.model.module.named_buffers() if "scratch" not in name]
        assert set(found) == set(trained) | set(buffers)
        for name, value in found.items():
            torch.testing.assert_close(value.to(state[name].dtype), state[name], rtol=0, atol=0)
        if masters := optimizer.get("masters"):
            numbers = [trained[place] for place in [*range(0, len(trained), 2), *range(1, len(trained), 2)]]
            for number, name in enumerate(numbers):
                require_same(found[name], masters[number], name)
        lamina.shutdown()


def case_training_goes_on_over_pipelines_and_copies():
    for layout, make in some((("pp4", adamw), ("pp2 dp2", fused), ("dp4", sgd)), 2):
        require_going_on(layout, make)


def case_training_goes_on_over_divided_states():
    for make, keys in some(((adamw, {}), (lamb, {"bf16": True})), 1):
        require_going_on("dp4 shared states", make, **keys)


def case_training_goes_on_over_shards():
    for layout, make in some((("sharded 4", fused), ("sharded 2, two copies", lamb), ("pp2 sharded 2", adamw)), 2):
        require_going_on(layout, make)


def case_training_goes_on_in_half_precision():
    require_going_on("dp4", fused, fp16=True, dynamic=True)
    for layout in some(("pp2 dp2", "sharded 4"), 1):
        require_going_on(layout, adamw, bf16=True)


def case_files_have_the_names_that_scripts_look_for():
    numbered = lambda names, numbers: [f"{name}_{n}.pt" for name in names for n in numbers]  # noqa: E731
    both, all_three = ("model", "optimizer"), ("fp16_states", "model", "optimizer")
    content = ["user_content.pt"]
    assert saved_names("pp4") == numbered(both, range(4)) + content
    assert saved_names("pp2 dp2", bf16=True) == numbered(all_three, range(2)) + content
    assert saved_names("dp4") == numbered(both, [0]) + content
    everyone = [f"0_0_{rank}" for rank in range(4)]
    assert saved_names("dp4 shared states") == ["model_0.pt", *numbered(["optimizer"], everyone), *content]
    assert saved_names("sharded 2, two copies") == ["model_0.pt", *numbered(["optimizer"], everyone[:2]), *content]
    half = [*numbered(["fp16_states"], everyone), "model_0.pt", *numbered(["optimizer"], everyone)]
    assert saved_names("sharded 4", bf16=True) == half + content


def case_newest_names_the_folder():
    with folder() as path:
        job = Job("pp2 dp2")
        job.train(1)
        for tag in ("one", "two", "three"):
            smp.save_checkpoint(path, tag, num_kept_partial_checkpoints=2)
        assert (path / "newest").read_text() == "three_partial"
        lamina.barrier()
        assert {entry.name for entry in path.glob("*_partial")} == {"two_partial", "three_partial"}
        smp.save_checkpoint(path, "two", user_content="anew")
        assert (path / "newest").read_text() == "two_partial"
        assert smp.resume_from_checkpoint(path) == "anew"
        lamina.shutdown()


def case_sharded_files_are_merged_as_scripts_do():
    for layout, keys in some((("sharded 4", {}), ("sharded 2, two copies", {"bf16": True})), 1):
        require_merges(layout, **keys)
    require_merges("sharded 4", bf16=True, sdp_param_persistence_threshold=64)


def case_shapes_of_the_script_stay():
    with folder() as path:
        job = Job("sharded 4")
        job.train(1)
        smp.save_checkpoint(path, "t", user_content={"buffer_names": ["mine"]})
        found = torch.load(path / "t_partial" / "user_content.pt", weights_only=False)
        assert found["buffer_names"] == ["mine"] and found["param_shapes"]
        lamina.shutdown()


def case_a_full_checkpoint_loads_in_any_layout():
    for first, second in some((("pp2 sharded 2", "dp4"), ("dp4", "pp4"), ("sharded 4", "pp2 dp2")), 2):
        with folder() as path:
            job = Job(first)
            job.train(2)
            expected = copy.deepcopy(job.model.state_dict())
            smp.save_checkpoint(
                path, "fullmodel.pt", partial=False, model=job.model, optimizer=job.optimizer, user_content=Arguments(2)
            )
            lamina.shutdown()
            assert not (path / "newest").exists()
            assert torch.load(path / "user_content_fullmodel.pt", weights_only=False) == Arguments(2)
            plain = torch.load(path / "fullmodel.pt", weights_only=True)
            require_same(plain, expected)
            Net().load_state_dict(plain)

            job = Job(second)
            assert smp.resume_from_checkpoint(path, tag="fullmodel.pt", partial=False) == Arguments(2)
            require_same(job.model.state_dict(), expected)
            job.train(1)
            assert smp.resume_from_checkpoint(path, tag="fullmodel.pt", partial=False) == Arguments(2)
            require_same(job.model.state_dict(), expected)
            lamina.shutdown()


def case_names_of_a_full_checkpoint_are_translated():
    with folder() as path:
        job = Job("pp2 dp2")
        job.train(1)
        expected = copy.deepcopy(job.model.state_dict())
        there = lambda state: {f"theirs.{name}": value for name, value in state.items()}  # noqa: E731
        back = lambda state: {name.removeprefix("theirs."): value for name, value in state.items()}  # noqa: E731
        smp.state.module_manager.translate_functions.append((there, back))
        try:
            smp.save_checkpoint(path, "theirs", partial=False)
            smp.save_checkpoint(path, "ours", partial=False, translate_if_full=False)
            lamina.barrier()
            assert all(name.startswith("theirs.") for name in torch.load(path / "theirs"))
            assert torch.load(path / "ours").keys() == expected.keys()
            for tag in ("theirs", "ours"):
                job.train(1)
                smp.resume_from_checkpoint(path, tag, partial=False)
                require_same(job.model.state_dict(), expected)
        finally:
            smp.state.module_manager.translate_functions.clear()
        job.train(1)
        with pytest.raises(lamina.UsageError, match="does not fit the model"):
            smp.resume_from_checkpoint(path, "theirs", partial=False)
        smp.resume_from_checkpoint(path, "theirs", partial=False, translate_function=back)
        require_same(job.model.state_dict(), expected)
        lamina.shutdown()


def case_what_the_trainer_leaves_is_no_content():
    """It writes the weights itself, and beside them an empty user_content.pt."""
    with folder() as path:
        job = Job("pp2 dp2")
        expected = copy.deepcopy(job.model.state_dict())
        if lamina.rank() == 0:
            torch.save({name: value + 1 for name, value in expected.items()}, path / "pytorch_model.bin")
            (path / "user_content.pt").touch()
        lamina.barrier()
        arguments = {"tag": "pytorch_model.bin", "partial": False, "load_optimizer": False}
        assert smp.resume_from_checkpoint(path, **arguments) is None
        require_same(job.model.state_dict(), {name: value + 1 for name, value in expected.items()})
        job.train(1)
        assert smp.resume_from_checkpoint(path=path, **arguments) is None
        require_same(job.model.state_dict(), {name: value + 1 for name, value in expected.items()})
        lamina.shutdown()


def require_states(job, expected):
    """The model's state, and its optimizer's but for the order of options."""
    found = job.states()
    require_same(found[0], expected[0])
    require_same([found[1]["state"], found[1].get("masters")], [expected[1]["state"], expected[1].get("masters")])
    rates = [[group["lr"] for group in state["param_groups"]] for state in (found[1], expected[1])]
    assert rates[0] == rates[1]


def require_carried(first, second, make=adamw, foreign=False, **keys):
    """A layout has all that another one saved: loaded before the model is partitioned, and afterwards."""
    with folder() as path:
        job = Job(first, make, **SEEDED, **keys)
        job.train(2)
        smp.save_checkpoint(path, "t", user_content={"a": Arguments(3)})
        expected = copy.deepcopy(job.states())
        if foreign:
            as_the_original_writes(path / "t_partial", placeholders="sharded" in first)
        lamina.shutdown()

        job = Job(second, make, **SEEDED, **keys)
        assert smp.resume_from_checkpoint(path)["a"] == Arguments(3)
        job.optimizer.zero_grad()
        evaluated(job)
        require_states(job, expected)
        job.train(1)
        assert smp.resume_from_checkpoint(path, "t")["a"] == Arguments(3)
        require_states(job, expected)
        job.steps = 2
        job.train(1)
        lamina.shutdown()


def case_any_layout_loads():
    require_carried("sharded 4", "pp2 dp2", fused)
    others = (
        ("pp4", "dp4 shared states", adamw, {"fp16": True, "dynamic": True}),
        ("dp4 shared states", "pp4", lamb, {}),
        ("sharded 2, two copies", "dp4", lamb, {"bf16": True}),
        ("pp2 dp2", "sharded 4", adamw, {"fp16": True}),
        ("pp2 sharded 2", "pp4", sgd, {}),
    )
    for first, second, make, keys in some(others, 2):
        require_carried(first, second, make, **keys)


def case_any_layout_loads_files_of_the_original():
    require_carried("sharded 4", "pp2 dp2", fused, foreign=True, bf16=True)
    for first, second, make in some((("dp4 shared states", "pp4", adamw), ("pp4", "sharded 4", sgd)), 1):
        require_carried(first, second, make, foreign=True)


def case_files_that_do_not_fit_change_nothing():
    """A rank's file that is missing or cut short, another shape, an optimizer that goes by numbers, hostile pickles."""
    with folder() as path:
        job = Job("pp2 dp2")
        job.train(1)
        smp.save_checkpoint(path, "t", user_content={"lr": 1})
        as_the_original_writes(path / "t_partial")
        before = copy.deepcopy(job.states())
        burnt = path / "burnt"

        def refused(name, change, error, match, **flags):
            file = path / "t_partial" / name
            kept = file.read_bytes()
            lamina.barrier()
            if lamina.rank() == 0:
                change(file)
            lamina.barrier()
            with pytest.raises(error, match=match):
                lamina.resume_from_checkpoint(path, **flags)
            require_same(job.states(), before)
            assert not burnt.exists()
            lamina.barrier()
            if lamina.rank() == 0:
                file.write_bytes(kept)
            lamina.barrier()

        def rewritten(change):
            def rewrite(file):
                held = torch.load(file, weights_only=False)
                torch.save(change(held) or held, file)

            return rewrite

        def by_numbers(held):
            held["param_groups"] = [{**group, "params": [0]} for group in held["param_groups"]]

        hostile = rewritten(lambda held: {**(held or {}), "evil": Ignites(burnt)})
        refused("model_1.pt", os.remove, lamina.FormatError, "models of 1 partitions and the optimizers of 2")
        refused("model_0.pt", os.remove, lamina.FormatError, r"model_0\.pt: the checkpoint has no such file")
        refused("optimizer_1.pt", lambda file: os.truncate(file, 900), lamina.FormatError, r"optimizer_1\.pt")
        wide = rewritten(lambda held: held.update({"embedding.weight": torch.zeros(3, 9)}))
        refused("model_0.pt", wide, lamina.UsageError, r"embedding\.weight has the shape", strict=False)
        refused("optimizer_0.pt", rewritten(by_numbers), lamina.UsageError, r"go by numbers.*load_optimizer")
        refused("model_0.pt", hostile, lamina.FormatError, r"model_0\.pt: the pickle names ")
        refused("optimizer_1.pt", hostile, lamina.FormatError, r"optimizer_1\.pt: the pickle names ")
        refused("user_content.pt", hostile, lamina.UsageError, "allow_pickle=True")
        assert lamina.resume_from_checkpoint(path) == {"lr": 1}
        lamina.shutdown()


def case_content_that_cannot_be_made_is_named():
    with folder() as path:
        job = Job("pp2 dp2")
        job.train(1)
        smp.save_checkpoint(path, "t", user_content=Arguments(1))
        lamina.barrier()
        made, before = globals().pop("Arguments"), copy.deepcopy(job.states())
        job.train(1)
        now = copy.deepcopy(job.states())
        try:
            with pytest.raises(lamina.UsageError, match=r"user_content cannot be made here, AttributeError"):
                smp.resume_from_checkpoint(path)
            require_same(job.states(), now)
        finally:
            globals()["Arguments"] = made
        assert smp.resume_from_checkpoint(path) == Arguments(1)
        require_same(job.states(), before)
        lamina.shutdown()


def case_tensors_that_do_not_lie_row_by_row_load():
    """As those of convolutions in channels_last: they are saved as they lie."""
    with folder() as path:
        job = Job("pp2 dp2")
        job.train(1)
        smp.save_checkpoint(path, "t")
        expected = copy.deepcopy(job.states())
        as_the_original_writes(path / "t_partial")
        if lamina.rank() == 0:
            held = torch.load(path / "t_partial/model_0.pt", weights_only=False)
            held["embedding.weight"] = held["embedding.weight"].t().contiguous().t()
            torch.save(held, path / "t_partial/model_0.pt")
        lamina.barrier()
        job.train(1)
        smp.resume_from_checkpoint(path)
        require_same(job.states(), expected)
        lamina.shutdown()


def case_damage_of_one_that_does_not_lie_row_by_row_is_found():
    with folder() as path:
        job = Job("pp2 dp2")
        with torch.no_grad():
            job.model.module.embedding.weight.data = torch.randn(9, VOCABULARY).t()
        job.train(1)
        smp.save_checkpoint(path, "t")
        lamina.barrier()
        if lamina.rank() == 0:
            file = path / "t_partial/model_0.pt"
            weight = torch.load(file, weights_only=False)["embedding.weight"]
            assert not weight.is_contiguous()
            held = bytearray(file.read_bytes())
            held[held.index(weight.t().numpy().tobytes()) + 5] ^= 16
            file.write_bytes(held)
        lamina.barrier()
        before = copy.deepcopy(job.states())
        with pytest.raises(lamina.FormatError, match=r"embedding.weight.*damaged"):
            smp.resume_from_checkpoint(path, "t")
        require_same(job.states(), before)
        lamina.shutdown()


def case_extra_states_are_there_again():
    """The model has one of its own, and a module a tensor; others would not be read again."""

    class Stateful(nn.Module):
        def __init__(self, inner, extra):
            super().__init__()
            self.inner, self.extra = inner, extra

        def forward(self, x):
            return self.inner(x)

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            self.extra = state

    with folder() as path:
        lamina.init(ddp=True, timeout_s=30)
        inner = Stateful(nn.Linear(2, 2), torch.arange(3))
        module = Stateful(inner, {"seen": (1, None)})
        lamina.DistributedModel(module)
        smp.save_checkpoint(path, "t")
        module.extra = inner.extra = None
        smp.resume_from_checkpoint(path)
        require_same((module.extra, inner.extra), ({"seen": (1, None)}, torch.arange(3)))
        inner.extra = {"values": torch.arange(3)}
        with pytest.raises(lamina.UsageError, match=r"extra state of inner .*checkpoint-cannot-save"):
            smp.save_checkpoint(path, "t")
        lamina.shutdown()


def case_the_two_forms_are_told_apart():
    with folder() as path:
        job = Job("pp2 dp2", **SEEDED)
        job.train(1)
        lamina.save_checkpoint(path, "ours", user_content={"form": "lamina"})
        smp.save_checkpoint(path, "theirs", user_content={"form": "smp"})
        lamina.save_checkpoint(path, "named", user_content={"form": "smp"}, form="smp")
        expected = copy.deepcopy(job.states())
        for tag, form in (("ours", "lamina"), ("theirs", "smp"), ("named", "smp")):
            job.train(1)
            assert lamina.resume_from_checkpoint(path, tag) == {"form": form}
            require_same(job.states(), expected)
        assert {file.suffix for file in (path / "ours_partial").iterdir()} == {".json", ".safetensors"}
        assert {file.suffix for file in (path / "named_partial").iterdir()} == {".json", ".pt"}
        lamina.shutdown()


def as_the_original_writes(place, placeholders=False):
    """Makes files of ours what the specification says of the original's: without a manifest and marks of ours, where
    parameters are sharded with placeholders for them in the model's file."""
    lamina.barrier()
    if lamina.rank() == 0:
        (place / "manifest.json").unlink()
        for file in place.glob("*.pt"):
            held = torch.load(file, weights_only=False)
            for mark in [key for key in held or () if str(key).startswith("_")]:
                del held[mark]
            getattr(held, "_metadata", {}).pop("_lamina_saved_by", None)
            if placeholders and "module" in (held or ()):
                of_parameters = [name for name, value in held["module"].items() if value.is_floating_point()]
                held["module"] |= {name: torch.empty(0) for name in of_parameters if "1.first.bias" not in name}
            torch.save(held, file)
    lamina.barrier()


def require_foreign(layout, placeholders=False, **keys):
    """Files without a manifest are resumed."""
    with folder() as path:
        job = Job(layout, **SEEDED, **keys)
        job.train(2)
        smp.save_checkpoint(path, "t", user_content={"a": Arguments(3)})
        expected = copy.deepcopy(job.states())
        as_the_original_writes(path / "t_partial", placeholders)
        for tag in (None, "t"):
            job.train(1)
            assert smp.resume_from_checkpoint(path, tag)["a"] == Arguments(3)
            require_same(job.model.state_dict(), expected[0])
            found = job.optimizer.state_dict()
            require_same([found["state"], found.get("masters")], [expected[1]["state"], expected[1].get("masters")])
        lamina.shutdown()

        job = Job(layout, **SEEDED, **keys)
        assert smp.resume_from_checkpoint(path)["a"] == Arguments(3)
        job.steps = 2
        job.train(1)
        job.model.state_dict()
        lamina.shutdown()


def case_files_of_the_original_are_resumed_in_their_layout():
    require_foreign("dp4 shared states")
    others = ("pp4", {}), ("sharded 4", {"placeholders": True})
    for (layout, keys), bf16 in some(itertools.product(others, (False, True)), 2, seed=1):
        require_foreign(layout, bf16=bf16, **keys)


def case_a_damaged_file_of_the_original_is_named():
    with folder() as path:
        job = Job("pp2 dp2")
        job.train(1)
        smp.save_checkpoint(path, "t")
        as_the_original_writes(path / "t_partial")
        file = path / "t_partial" / "optimizer_1.pt"
        if lamina.rank() == 0:
            damaged = bytearray(file.read_bytes())
            damaged[len(damaged) // 2] ^= 1
            file.write_bytes(damaged)
        lamina.barrier()
        before = copy.deepcopy(job.states())
        with pytest.raises(lamina.FormatError, match=r"optimizer_1\.pt.*checksum"):
            smp.resume_from_checkpoint(path)
        require_same(job.states(), before)
        lamina.shutdown()


def convert(path, out):
    """Runs the command on rank 0; all ranks hear what it said."""
    said = ""
    if lamina.rank() == 0:
        words = [command(), "checkpoint", "convert", str(path), str(out)]
        result = subprocess.run(words, capture_output=True, text=True, timeout=60)
        said = result.stdout if result.returncode == 0 else result.stderr
    return lamina.allgather(said, lamina.WORLD)[0]


def require_converted(first, second, make=adamw, placeholders=False, **keys):
    """A checkpoint that the command makes of the files loads in any layout, with the optimizer."""
    with folder() as path:
        job = Job(first, make, **keys)
        job.train(2)
        smp.save_checkpoint(path, "t", user_content={"a": Arguments(3)})
        expected = copy.deepcopy(job.states())
        as_the_original_writes(path / "t_partial", placeholders)
        for number, source in enumerate((path, path / "t_partial")):
            said = convert(source, path / f"out{number}")
            left = " head.weight" if placeholders else ""  # which is tied
            assert f"left: user_content{left}\n" in said, said
        lamina.shutdown()
        job = Job(second, make, **keys)
        assert smp.resume_from_checkpoint(path / "out1") is None
        job.optimizer.zero_grad()
        evaluated(job)
        found = job.states()
        require_same(found[0], expected[0])
        require_same(found[1]["state"], expected[1]["state"])
        require_same(found[1].get("masters"), expected[1].get("masters"))
        require_same(
            [group["lr"] for group in found[1]["param_groups"]], [g["lr"] for g in expected[1]["param_groups"]]
        )
        lamina.shutdown()


def evaluated(job):
    """Has the model partitioned without a change."""
    batch = torch.zeros(ROWS // lamina.dp_size(), 5, dtype=torch.int64)
    evaluate(job.model, batch)


@lamina.step
def evaluate(model, x):
    return model(x).sum()


def case_converted_files_of_the_original_load_in_any_layout():
    require_converted("sharded 4", "pp2 dp2", fused, placeholders=True)
    others = [
        ("pp4", "dp4", adamw, {"bf16": True}),
        ("dp4 shared states", "pp2 dp2", sgd, {}),
        ("sharded 2, two copies", "pp4", lamb, {"bf16": True}),
    ]
    for first, second, make, keys in some(others, 1):
        require_converted(first, second, make, **keys)


def case_damage_is_found_before_a_pickle_is_read():
    with folder() as path:
        job = Job("pp2 dp2")
        job.train(1)
        smp.save_checkpoint(path, "t")
        before, place = copy.deepcopy(job.states()), path / "t_partial" / "optimizer_1.pt"
        lamina.barrier()
        if lamina.rank() == 0:
            hostile = torch.save(Ignites(path / "burnt"), path / "hostile") or (path / "hostile").read_bytes()
            size = place.stat().st_size
            place.write_bytes(hostile[:size].ljust(size, b"\0"))
        lamina.barrier()
        with pytest.raises(lamina.FormatError, match=r"optimizer_1\.pt"):
            smp.resume_from_checkpoint(path)
        assert not (path / "burnt").exists()
        require_same(job.states(), before)
        lamina.shutdown()


class Ignites:
    """An object whose loading leaves a trace."""

    def __init__(self, place: pathlib.Path):
        self.place = place

    def __reduce__(self):
        return (pathlib.Path.touch, (self.place,))


def case_a_save_that_fails_leaves_the_one_before():
    with folder() as path:
        job = Job("pp2 dp2")
        job.train(1)
        for partial in (True, False):
            smp.save_checkpoint(path, "t", partial=partial, user_content="good")
            with pytest.raises(lamina.UsageError, match="cannot be pickled"):
                smp.save_checkpoint(path, "t", partial=partial, user_content=lambda: None)
            assert smp.resume_from_checkpoint(path, "t", partial=partial) == "good"
        with pytest.raises(lamina.UsageError, match=r"on rank 1.*this one burns"):
            with_a_burning_state(job, lambda: smp.save_checkpoint(path, "t", user_content="lost"))
        assert smp.resume_from_checkpoint(path, "t") == "good"
        lamina.barrier()
        assert not list(path.glob("*.tmp*"))
        lamina.shutdown()


def with_a_burning_state(job, do):
    """Calls it while a state of rank 1 cannot be pickled."""
    place = job.optimizer.param_groups[0]["params"][0]
    if lamina.rank() == 1:
        job.optimizer.state[place]["extra"] = Burns()
    try:
        do()
    finally:
        job.optimizer.state[place].pop("extra", None)


class Burns:
    def __reduce__(self):
        raise RuntimeError("this one burns")


def case_no_optimizer_where_none_is_asked_for():
    with folder() as path:
        job = Job("pp2 dp2", **SEEDED)
        job.train(1)
        saved = copy.deepcopy(job.model.state_dict())
        smp.save_checkpoint(path, "t")
        job.train(1)
        optimizer = copy.deepcopy(job.optimizer.state_dict())
        smp.resume_from_checkpoint(path, load_optimizer=False)
        require_same(job.model.state_dict(), saved)
        found = job.optimizer.state_dict()
        require_same(found["state"], optimizer["state"])
        lamina.shutdown()


def case_masters_alone_come_without_states_of_shards():
    with folder() as path:
        job = Job("sharded 4", bf16=True)
        job.train(2)
        smp.save_checkpoint(path, "t")
        saved = copy.deepcopy(job.optimizer.state_dict())
        job.train(1)
        states = copy.deepcopy(job.optimizer.state_dict()["state"])
        smp.resume_from_checkpoint(path, load_sharded_optimizer_state=False)
        found = job.optimizer.state_dict()
        require_same(found["masters"], saved["masters"])
        require_same(found["state"], states)
        lamina.shutdown()


def case_a_schedule_goes_on_from_before_the_partition():
    """Options of the groups are there at once, before the first step, and what a schedule then writes stays."""
    with folder() as path:
        job = Job("pp4", **SEEDED)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.5)
        for _ in range(3):
            job.train(1)
            scheduler.step()
        smp.save_checkpoint(path, "t", user_content={"scheduler": scheduler.state_dict(), "steps": 3})
        job.train(1)
        scheduler.step()
        expected = job.train(2), job.states(), [group["lr"] for group in job.optimizer.param_groups]
        lamina.shutdown()

        job = Job("pp4", **SEEDED)
        assert not job.model.partitioned
        assert list(job.model.get_module().children())
        job.optimizer.zero_grad(set_to_none=True)
        groups = list(job.optimizer.param_groups)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.5)
        content = smp.resume_from_checkpoint(path)
        assert content["steps"] == 3
        scheduler.load_state_dict(content["scheduler"])
        assert groups[0]["lr"] == 3e-3 * 0.5**3
        job.steps = 3
        job.train(1)
        scheduler.step()
        found = job.train(2), job.states(), [group["lr"] for group in groups]
        require_same(found, expected)
        assert all(one is other for one, other in zip(groups, job.optimizer.param_groups, strict=True))
        lamina.shutdown()


def case_a_trainer_resumes():
    for partitions in some((2, 4), 1):
        require_resumed(partitions=partitions)


def case_a_trainer_that_wrote_safetensors_resumes():
    """It names `pytorch_model.bin` all the same."""
    with folder() as path:
        job = Job("pp2 dp2")
        job.train(1)
        expected = copy.deepcopy(job.model.state_dict())
        lamina.save_checkpoint(path, "full", partial=False)
        lamina.barrier()
        if lamina.rank() == 0:
            (path / "full" / "manifest.json").unlink()
            (path / "full" / "user_content.pt").touch()
        lamina.barrier()
        job.train(1)
        arguments = {"tag": "pytorch_model.bin", "partial": False, "load_optimizer": False}
        assert smp.resume_from_checkpoint(path / "full", **arguments) is None
        require_same(job.model.state_dict(), expected)
        lamina.shutdown()
