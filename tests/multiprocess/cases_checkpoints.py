# SPDX-License-Identifier: Apache-2.0
"""Cases for four ranks: checkpoints from one layout into another, training that goes on as if it had never ended."""

import contextlib
import copy
import itertools
import json
import os
import pathlib
import random
import shutil
import tempfile
import unittest.mock
from collections import Counter

import pytest
import safetensors
import torch
from multiprocess.steps import said_on_stderr
from soak import SOAK, some
from torch import nn

import lamina
from lamina.checkpoints.checkpointed_job import CheckpointedJob

ROWS = 8  # of the whole batch
VOCABULARY = 1009  # divides by nothing
SHARDED = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9}
LAYOUTS = {
    "pp4": {"partitions": 4},
    "pp2 dp2": {"partitions": 2, "ddp": True},
    "dp4": {"ddp": True},
    "dp4 shared states": {"ddp": True, "shard_optimizer_state": True},
    "sharded 4": {"ddp": True, "sharded_data_parallel_degree": 4, **SHARDED},
    "sharded 2, two copies": {"ddp": True, "sharded_data_parallel_degree": 2, **SHARDED},
    "pp2 sharded 2": {"partitions": 2, "ddp": True, "sharded_data_parallel_degree": 2, **SHARDED},
}


class Net(nn.Module):
    """Tied weights, a frozen one, buffers, dropout, odd sizes, an extra state."""

    def __init__(self, dropout=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 9)
        self.blocks = nn.Sequential(*(Block(9, dropout) for _ in range(4)))
        self.head = nn.Linear(9, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].first.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x)))


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.first = nn.Linear(width, 7)
        self.second = nn.Linear(7, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        return x + self.dropout(self.second(torch.tanh(self.first(self.norm(x)))))


@lamina.step
def train(model, x):
    loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.flatten())
    model.backward(loss)
    return loss


# Grows and falls several times in the steps of a case.
SCALE = {"init_scale": 2.0**24, "scale_window": 5}


def adamw(parameters):
    parameters = list(parameters)
    groups = [{"params": parameters[::2], "lr": 3e-3}, {"params": parameters[1::2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def fused(parameters):
    return lamina.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def lamb(parameters):
    return lamina.optim.LAMB(parameters, lr=1e-2)


def adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=1e-2)


class Job:
    """A training over all ranks, `scheduled` with learning rates that a scheduler sets."""

    def __init__(self, layout, make=adamw, dynamic=False, dropout=0.1, scheduled=False, **keys):
        keys = {"deterministic_server": True, "microbatches": 2, "timeout_s": 30} | LAYOUTS[layout] | keys
        lamina.init(**keys)
        self.model = lamina.DistributedModel(Net(dropout))
        self.optimizer = lamina.DistributedOptimizer(
            make(parameter for parameter in self.model.parameters() if parameter.requires_grad),
            **({"dynamic_loss_scale": True, "dynamic_loss_args": SCALE} if dynamic else {}),
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 70) if scheduled else None
        self.steps = 0

    def train(self, steps):
        """The losses of so many steps more."""
        rows, losses = ROWS // lamina.dp_size(), []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.steps)
            batch = torch.randint(VOCABULARY, (ROWS, 5), generator=generator)
            self.optimizer.zero_grad()
            losses.append(float(train(self.model, batch[lamina.dp_rank() * rows :][:rows]).reduce_mean()))
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.steps += 1
        return losses

    def content(self):
        """Returns what a checkpoint of it has as user_content."""
        return {"steps": self.steps, "scheduler": self.scheduler.state_dict()}

    def resume(self, path):
        content = lamina.resume_from_checkpoint(path)
        self.steps = content["steps"]
        self.scheduler.load_state_dict(content["scheduler"])

    def states(self):
        return self.model.state_dict(), self.optimizer.state_dict()


@contextlib.contextmanager
def folder():
    """A folder that all ranks see, until all have left the body."""
    lamina.init(timeout_s=30)
    names = lamina.allgather(tempfile.mkdtemp() if lamina.rank() == 0 else "", lamina.CommGroup.WORLD)
    lamina.shutdown()
    try:
        yield pathlib.Path(names[0])
        lamina.shutdown()
        lamina.init(timeout_s=30)
    finally:
        lamina.shutdown()
        shutil.rmtree(names[0], ignore_errors=True)


def require_same(found, expected, where=""):
    """Bitwise, at any depth."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, where
        assert torch.equal(found, expected), f"{where}: {found} is not {expected}"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{where}: {found.keys() ^ expected.keys()}"
        for key in expected:
            require_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            require_same(one, other, f"{where}[{number}]")
    else:
        assert found == expected, f"{where}: {found!r} is not {expected!r}"


def require_going_on(layout, make=adamw, steps=3, **keys):
    """Training that is saved, ended and resumed is the one that was not: bit by bit, for so many steps more."""
    with folder() as path:
        job = Job(layout, make, scheduled=True, **keys)
        job.train(3)
        lamina.save_checkpoint(path, "three", user_content=job.content())
        expected = job.train(steps), job.states(), job.scheduler.get_last_lr()
        lamina.shutdown()

        job = Job(layout, make, scheduled=True, **keys)
        torch.manual_seed(99)  # which the checkpoint's generators take the place of
        job.resume(path)
        found = job.train(steps), job.states(), job.scheduler.get_last_lr()
        require_same(found, expected)
        lamina.shutdown()


def whole_loss(job):
    """The loss of the next step over the rows of all copies."""
    losses = lamina.allgather(job.train(1)[0], lamina.CommGroup.WORLD)
    return sum(losses) / len(losses)


def require_same_next_loss(first, second, make=adamw, **keys):
    """The step after a checkpoint has the same loss in another layout as in the one that saved it."""
    with folder() as path:
        job = Job(first, make, dropout=0.0, scheduled=True, **keys)
        job.train(3)
        lamina.save_checkpoint(path, "three", user_content=job.content())
        expected = whole_loss(job)
        lamina.shutdown()

        job = Job(second, make, dropout=0.0, scheduled=True, **keys)
        job.resume(path)
        found = whole_loss(job)
        assert abs(found - expected) <= 1e-6 * abs(expected), f"{first} to {second}: {found} is not {expected}"
        lamina.shutdown()


def require_carried(first, second, make=adamw, keys=({}, {})):
    """States of one layout are those of another one that loads them, and of the first that loads them back."""
    with folder() as path:
        job = Job(first, make, **keys[0])
        job.train(2)
        expected = job.states()
        lamina.save_checkpoint(path, "a")
        lamina.shutdown()

        job = Job(second, make, **keys[1])
        lamina.resume_from_checkpoint(path, "a")
        if not job.model.partitioned:
            evaluate(job)
        found = job.states()
        if all(keys[0].get(name) == keys[1].get(name) for name in ("bf16", "fp16")):
            require_same(found, expected)
        lamina.save_checkpoint(path, "b")
        lamina.shutdown()

        job = Job(first, make, **keys[0])
        lamina.resume_from_checkpoint(path, "b")
        if not job.model.partitioned:
            evaluate(job)
        require_same(job.states(), expected)
        assert all(loss == loss for loss in job.train(1))
        lamina.shutdown()


@lamina.step
def forward(model, x):
    return model(x)


def evaluate(job):
    with torch.no_grad():
        forward(job.model, torch.zeros(ROWS, 5, dtype=torch.int64))


def drop_order(states):
    """Dictionaries compare without their order."""
    return states


def case_training_goes_on_over_pipelines():
    require_going_on("pp4")
    require_going_on("pp2 dp2", fused)


def case_training_goes_on_over_copies():
    require_going_on("dp4", sgd)
    require_going_on("dp4 shared states", adamw)


def case_training_goes_on_over_shards():
    others = ("sharded 4", fused), ("sharded 2, two copies", lamb), ("pp2 sharded 2", adafactor)
    for layout, make in some(others, 2, seed=1):
        require_going_on(layout, make)


def case_training_goes_on_in_half_precision():
    require_going_on("dp4 shared states", fused, fp16=True, dynamic=True)
    for layout, make in some((("pp2 dp2", adamw), ("sharded 4", lamb)), 1):
        require_going_on(layout, make, bf16=True)


def case_fifty_more_steps_are_those_of_a_training_that_never_ended():
    require_going_on("pp2 dp2", adamw, steps=50, fp16=True, dynamic=True)
    others = [
        ("pp4", fused, {}),
        ("dp4 shared states", adamw, {"bf16": True}),
        ("sharded 2, two copies", fused, {}),
        ("pp2 sharded 2", adamw, {"bf16": True}),
    ]
    for layout, make, keys in some(others, 0):
        require_going_on(layout, make, steps=50, **keys)


def case_the_next_loss_is_the_same_in_any_layout():
    pairs = list(itertools.permutations(LAYOUTS, 2))
    for first, second in some(pairs, 3, seed=4):
        require_same_next_loss(first, second, fused)
    for first, second in some(pairs, 1, seed=5):
        require_same_next_loss(first, second, adamw, bf16=True)


def case_training_goes_on_with_a_seed():
    require_going_on("pp2 dp2", adamw, seed=5)


def case_pipelines_become_copies_and_back():
    for first, second, make in some((("pp4", "dp4", adamw), ("pp2 dp2", "pp4", lamb)), 1):
        require_carried(first, second, make)


def case_copies_become_shards_and_back():
    for first, second, make in some(
        (("dp4", "sharded 4", adamw), ("dp4 shared states", "sharded 2, two copies", lamb)), 1, seed=1
    ):
        require_carried(first, second, make)


def case_shards_become_pipelines_and_back():
    for first, second, make in some((("sharded 4", "pp4", adamw), ("pp2 sharded 2", "dp4 shared states", fused)), 1):
        require_carried(first, second, make)


def case_states_of_whole_parameters_find_their_owners():
    for first, second in some((("sharded 4", "pp2 dp2"), ("dp4 shared states", "sharded 2, two copies")), 1):
        require_carried(first, second, adafactor)


def case_masters_go_along():
    half = {"bf16": True}
    require_carried("dp4", "sharded 2, two copies", adamw, (half, {}))
    for first, second, make in some((("dp4 shared states", "sharded 4", fused), ("pp2 dp2", "dp4", adamw)), 1):
        require_carried(first, second, make, (half, half))


def case_half_precision_of_another_kind_is_that_of_the_masters():
    found = {}
    with folder() as path:
        job = Job("dp4 shared states", fused, fp16=True)
        job.train(2)
        lamina.save_checkpoint(path, "a")
        lamina.shutdown()
        for name, keys in {"whole": {}, "half": {"bf16": True}}.items():
            job = Job("pp2 dp2", fused, **keys)
            lamina.resume_from_checkpoint(path)
            evaluate(job)
            found[name] = job.model.state_dict()
            lamina.shutdown()
    for name, value in found["whole"].items():
        require_same(found["half"][name], value.bfloat16() if value.is_floating_point() else value, name)


def case_half_parameters_that_were_not_saved_stay_with_their_masters():
    """With strict=False the others are loaded."""
    layers = [nn.Linear(3, 4), nn.Linear(4, 2)]
    with folder() as path:
        lamina.init(**LAYOUTS["dp4"], timeout_s=30)
        model = lamina.DistributedModel(nn.Sequential(*layers[:1]))
        lamina.DistributedOptimizer(fused(model.parameters()))
        lamina.save_checkpoint(path, "a")
        saved = copy.deepcopy(model.state_dict())
        lamina.shutdown()
        lamina.init(**LAYOUTS["dp4"], bf16=True, timeout_s=30)
        model = lamina.DistributedModel(nn.Sequential(*map(copy.deepcopy, layers)))
        lamina.DistributedOptimizer(fused(model.parameters()))
        expected = copy.deepcopy(model.state_dict()) | {name: value.bfloat16() for name, value in saved.items()}
        lamina.resume_from_checkpoint(path, strict=False)
        require_same(model.state_dict(), expected)
        lamina.shutdown()


def case_the_saved_partition_is_kept_in_a_job_with_as_many():
    with folder() as path:
        job = Job("pp4", auto_partition=False, default_partition=2)
        job.train(1)
        lamina.save_checkpoint(path, "a")
        expected = job.model.partition_report()["partition"]
        assert set(expected.values()) == {2}
        lamina.shutdown()
        job = Job("pp4")
        lamina.resume_from_checkpoint(path)
        evaluate(job)
        assert job.model.partition_report()["partition"] == expected


def case_a_partition_file_is_written_and_read():
    with folder() as path:
        file = str(path / "partition.json")
        job = Job("pp4", partition_file=file)
        job.train(1)
        expected = job.model.partition_report()["partition"]
        lamina.shutdown()
        job = Job("pp4", partition_file=file, load_partition=True, auto_partition=False, default_partition=2)
        job.train(1)
        assert job.model.partition_report()["partition"] == expected


def case_a_save_goes_on_while_training_does():
    with folder() as path:
        job = Job("pp2 sharded 2", fused)
        job.train(2)
        expected = copy.deepcopy(job.states())
        handle = lamina.save_checkpoint(path, "a", asynchronous=True)
        job.train(3)  # into other values
        handle.wait()
        assert handle.done()
        lamina.shutdown()
        job = Job("pp2 sharded 2", fused)
        lamina.resume_from_checkpoint(path)
        evaluate(job)
        require_same(job.states(), expected)


def case_user_content_is_what_it_was():
    scheduler = {"milestones": Counter({3: 1}), "base_lrs": [0.1], "last_epoch": 4, "_step_count": 5}
    content = {
        "scheduler": scheduler,
        "epoch": 3,
        "best": float("inf"),
        "none": None,
        "tensors": [torch.arange(5), torch.linspace(0, 1, 6, dtype=torch.bfloat16).view(2, 3)],
        "tuple": (1, (2.5, "x"), {"b": 1, "a": 2}),
        "keys": {1: "one", (2, 3): b"\x00\xff"},
        "big": 2**80,
        "set": {1, 2},
    }
    with folder() as path:
        job = Job("dp4")
        job.train(1)
        lamina.save_checkpoint(path, "a", user_content=content)
        found = lamina.resume_from_checkpoint(path)
        require_same(found, content)
        assert list(found["tuple"][2]) == ["b", "a"] and type(found["scheduler"]["milestones"]) is Counter


def case_objects_are_pickled_only_where_both_sides_say_so():
    with folder() as path:
        job = Job("dp4")
        job.train(1)
        content = pathlib.PurePosixPath("x"), nn.Identity()
        with pytest.raises(lamina.UsageError, match="pickle"):
            lamina.save_checkpoint(path, "a", user_content=content)
        assert not list(path.iterdir())
        lamina.save_checkpoint(path, "a", user_content=content, allow_pickle=True)
        with pytest.raises(lamina.UsageError, match="pickle"):
            lamina.resume_from_checkpoint(path)
        found = lamina.resume_from_checkpoint(path, allow_pickle=True)
        assert isinstance(found[1], nn.Identity)


def case_what_does_not_fit_changes_nothing():
    with folder() as path:
        job = Job("dp4")
        job.train(1)
        lamina.save_checkpoint(path, "a")
        lamina.shutdown()
        job = Job("dp4", fused)  # one group
        before = job.states()
        with pytest.raises(lamina.UsageError, match="2 in the checkpoint"):
            lamina.resume_from_checkpoint(path)
        require_same(job.states(), before)
        with pytest.raises(lamina.UsageError, match="no checkpoint b"):
            lamina.resume_from_checkpoint(path, "b")
        with pytest.raises(lamina.UsageError, match="no checkpoint in"):
            lamina.resume_from_checkpoint(path / "elsewhere")
        with said_on_stderr() as said:
            assert lamina.resume_from_checkpoint(path / "elsewhere", missing_ok=True) is None
            lamina.barrier()
        assert ("elsewhere: nothing is loaded" in said[0]) == (lamina.rank() == 0)
        with pytest.raises(lamina.UsageError, match="no checkpoint b"):
            lamina.resume_from_checkpoint(path, "b", missing_ok=True)
        require_same(job.states(), before)
        lamina.resume_from_checkpoint(path, load_optimizer=False)
        lamina.save_checkpoint(path, "b")
        lamina.shutdown()
        for layout in ("dp4", "pp4"):  # before the cut as after it
            job = Job(layout, sgd)
            if layout == "pp4":
                job.train(1)
            before = job.states()
            with pytest.raises(lamina.UsageError, match="of the class SGD here and AdamW in the checkpoint"):
                lamina.resume_from_checkpoint(path)
            with pytest.raises(lamina.UsageError, match="no dampening, momentum in the checkpoint, which SGD needs"):
                lamina.resume_from_checkpoint(path, strict=False)
            require_same(job.states(), before)
            lamina.shutdown()


def case_only_so_many_are_kept():
    with folder() as path:
        job = Job("dp4")
        for step in range(4):
            job.train(1)
            lamina.save_checkpoint(path, f"step{step}", num_kept_partial_checkpoints=2)
        names = lamina.allgather(sorted(entry.name for entry in path.iterdir()), lamina.CommGroup.WORLD)
        assert names[0] == ["newest", "step2_partial", "step3_partial"], names[0]


def refused_where_rank_2_differs(call, arguments, name, other):
    arguments = {**arguments, name: other} if lamina.rank() == 2 else arguments
    with pytest.raises(lamina.UsageError, match=rf"{name} is .* on ranks 0, 1, 3 and .* on rank 2\.") as caught:
        call(**arguments)
    assert caught.value.code == "checkpoint-refused"


def case_arguments_that_differ_are_refused_on_all_ranks_before_anything_is_done():
    with folder() as path:
        job = Job("dp4")
        job.train(1)
        usual = {"path": path, "tag": "a", "partial": True, "form": None, "num_kept_partial_checkpoints": None}
        usual |= {"asynchronous": False, "allow_pickle": False, "optimizer": None, "translate_if_full": True}
        other = {"path": path / "own", "tag": "b", "partial": False, "form": "smp", "num_kept_partial_checkpoints": 1}
        other |= {"asynchronous": True, "allow_pickle": "yes", "optimizer": 3, "translate_if_full": False}
        for name, value in other.items():
            refused_where_rank_2_differs(lamina.save_checkpoint, usual, name, value)
        lamina.barrier()
        assert not list(path.iterdir())
        # Optimizers are the same, named or as the only one; content is that of rank 0.
        optimizer = None if lamina.rank() == 0 else job.optimizer
        lamina.save_checkpoint(path, "a", optimizer=optimizer, user_content=lamina.rank())

        before = job.states()
        flags = ("partial", "strict", "load_optimizer", "load_sharded_optimizer_state", "verify")
        usual = {
            "path": path,
            "tag": "a",
            "translate_function": None,
            "allow_pickle": False,
            **dict.fromkeys(flags, True),
        }
        other = {"path": str(path / "own"), "tag": None, "translate_function": dict, "allow_pickle": True}
        for name, value in (other | dict.fromkeys(flags, False)).items():
            refused_where_rank_2_differs(lamina.resume_from_checkpoint, usual, name, value)
        with pytest.raises(lamina.DesyncError, match=r"resume_from.*save_checkpoint"):
            lamina.save_checkpoint(path, "a") if lamina.rank() == 2 else lamina.resume_from_checkpoint(path)
        require_same(job.states(), before)
        assert lamina.resume_from_checkpoint(path if lamina.rank() else str(path)) == 0


def case_a_tag_or_a_path_that_a_terminal_would_obey_is_refused():
    with folder() as path:
        job = Job("dp4")
        job.train(1)
        for tag in ("red\x1b[31m", "two\nlines", "\u202egnp", "cut\0off"):
            for keys in ({}, {"form": "smp", "partial": False}):
                with pytest.raises(lamina.UsageError, match="is no tag") as caught:
                    lamina.save_checkpoint(path, tag, **keys)
                assert str(caught.value).isprintable()
        for call in (lamina.save_checkpoint, lamina.resume_from_checkpoint):
            with pytest.raises(lamina.UsageError, match="path has a NUL"):
                call(f"{path}/own\0", "a")
            with pytest.raises(lamina.UsageError, match=r"s3:// begins the address .*\[checkpoint-remote\]"):
                call("s3://bucket/own", "a")
        lamina.barrier()
        assert not list(path.iterdir())


def two_saves(path, layout="pp2 dp2"):
    """A job that has saved "a" and then "b"."""
    job = Job(layout)
    for tag in "ab":
        job.train(1)
        lamina.save_checkpoint(path, tag, user_content=tag)
    return job


def flip(folder, pattern="model-*"):
    """Changes a bit of a file."""
    if lamina.rank() == 0:
        data = next(folder.glob(pattern))
        bytes_ = bytearray(data.read_bytes())
        bytes_[-3] ^= 1
        data.write_bytes(bytes_)
    lamina.barrier()


def case_a_damaged_one_is_named_and_the_one_before_is_taken():
    with folder() as path:
        job = two_saves(path)
        flip(path / "b_partial")
        before = job.states()
        with pytest.raises(lamina.FormatError, match=r"model-.*damaged.*the latest whole one before it is 'a'"):
            lamina.resume_from_checkpoint(path, "b")
        require_same(job.states(), before)
        assert lamina.resume_from_checkpoint(path) == "a"
        if lamina.rank() == 0:
            next((path / "b_partial").glob("model-*")).unlink()
        lamina.barrier()
        assert lamina.resume_from_checkpoint(path) == "a"


def case_damage_of_one_ranks_generators_changes_nothing():
    with folder() as path:
        job = two_saves(path)
        job.train(1)
        about = json.loads((path / "b_partial" / "manifest.json").read_text())["about"]
        assert about["version"] == 2 and "generators" not in about  # each rank has written its own
        flip(path / "b_partial", "content-00003*")
        before = job.states()
        with pytest.raises(lamina.FormatError, match=r"content-00003.*generator/2"):
            lamina.resume_from_checkpoint(path, "b")
        require_same(job.states(), before)


def case_a_newest_that_is_no_file_is_not_waited_for():
    with folder() as path:
        two_saves(path)
        if lamina.rank() == 0:
            (path / "newest").unlink()
            os.mkfifo(path / "newest")
        lamina.barrier()
        assert lamina.resume_from_checkpoint(path) == "b"


def case_damage_is_found_before_the_model_is_partitioned():
    with folder() as path:
        two_saves(path)
        flip(path / "b_partial", "optimizer-*")
        lamina.shutdown()
        job = Job("pp2 dp2")
        with pytest.raises(lamina.FormatError, match=r"optimizer-.*damaged.*before it is 'a'"):
            lamina.resume_from_checkpoint(path, "b")
        assert lamina.resume_from_checkpoint(path) == "a"
        job.train(1)
        found = job.states()
        lamina.shutdown()
        job = Job("pp2 dp2")
        assert lamina.resume_from_checkpoint(path, "a") == "a"
        job.train(1)
        require_same(found, job.states())


@contextlib.contextmanager
def damaged_after_it_was_read(folder, damage=flip):
    """Damages a folder between the two reads of it."""
    wait_for_cut = CheckpointedJob.wait_for_cut

    def damage_it(job, resumption):
        lamina.barrier()
        damage(folder)
        wait_for_cut(job, resumption)

    with unittest.mock.patch.object(CheckpointedJob, "wait_for_cut", damage_it):
        yield


def case_what_is_damaged_between_its_two_reads_is_said_to_have_left_a_mixture():
    with folder() as path:
        job = two_saves(path, "sharded 4")
        before = job.states()
        with damaged_after_it_was_read(path / "b_partial"), pytest.raises(lamina.FormatError, match="is a mixture now"):
            lamina.resume_from_checkpoint(path, "b")
        flip(path / "b_partial")
        assert lamina.resume_from_checkpoint(path) == "b"
        require_same(job.states(), before)


def remove(folder):
    if lamina.rank() == 0:
        shutil.rmtree(folder)
    lamina.barrier()


def case_what_is_removed_between_its_two_reads_is_said_to_have_left_a_mixture():
    with folder() as path:
        job = two_saves(path, "sharded 4")
        with (
            damaged_after_it_was_read(path / "b_partial", remove),
            pytest.raises(lamina.FileError, match="mixture now"),
        ):
            lamina.resume_from_checkpoint(path, "b")
        assert lamina.resume_from_checkpoint(path, "a") == "a"
        job.train(1)


def require_whole_model(layout, **keys):
    with folder() as path:
        job = Job(layout, **keys)
        job.train(1)
        expected = {name: value.float() for name, value in job.model.state_dict().items()}
        lamina.save_checkpoint(path, "model", partial=False, user_content=7)
        lamina.save_checkpoint(path, "model_of_training")
        found = lamina.resume_from_checkpoint(path, partial=False), lamina.resume_from_checkpoint(path)
        assert found == (7, None)
        lamina.shutdown()
        tensors = {}
        for file in (path / "model").glob("model*.safetensors"):
            with safetensors.safe_open(file, "pt") as opened:
                tensors |= {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
        del expected["head.weight"]  # tied
        require_same({name: tensors[name] for name in expected}, expected)
        job = Job("pp2 dp2", sgd)
        assert lamina.resume_from_checkpoint(path, "model", partial=False) == 7
        evaluate(job)
        found = job.model.state_dict()
        require_same({name: found[name].float() for name in expected}, expected)


def case_a_whole_model_has_whole_tensors_in_any_layout():
    for layout, keys in some((("pp4", {}), ("dp4 shared states", {"bf16": True}), ("pp2 sharded 2", {})), 2):
        require_whole_model(layout, **keys)


def case_files_of_torch_are_loaded_as_whole_models():
    with folder() as path:
        torch.manual_seed(5)
        state = {
            name: torch.randn_like(value) if value.is_floating_point() else value + 3
            for name, value in Net().state_dict().items()
        }
        state["head.weight"] = state["embedding.weight"]
        file = path / "hub" / "pytorch_model.bin"
        for layout in ("pp4", "sharded 4"):
            job = Job(layout)
            if lamina.rank() == 0:
                file.parent.mkdir(exist_ok=True)
                torch.save(state, file)
            lamina.barrier()
            assert lamina.resume_from_checkpoint(path / "hub", partial=False) is None
            evaluate(job)
            require_same(dict(job.model.state_dict()), dict(state))
            lamina.shutdown()
        job = Job("dp4")
        if lamina.rank() == 0:
            torch.save({f"x.{name}": value for name, value in state.items()}, file)
        lamina.barrier()
        with pytest.raises(RuntimeError, match=r"x\.blocks"):
            lamina.resume_from_checkpoint(path, "hub", partial=False)
        renamed = lambda found: {name.removeprefix("x."): value for name, value in found.items()}  # noqa: E731
        lamina.resume_from_checkpoint(path, "hub", partial=False, translate_function=renamed)
        require_same(dict(job.model.state_dict()), dict(state))


MAKERS = (adamw, fused, sgd, lamb, adafactor)


DTYPES = ({}, {"bf16": True}, {"fp16": True})
# Where partitions cut the model as they are told, the others stay empty.
CUTS = ({}, {}, {"auto_partition": False, "default_partition": 0})


def case_any_drawn_layout_carries_states_to_any_other():
    draw = random.Random(7)
    for _ in range(60 if SOAK else 3):
        first, second = draw.choice(list(LAYOUTS)), draw.choice(list(LAYOUTS))
        make = draw.choice(MAKERS)
        dtypes = draw.choice(DTYPES)
        others = dtypes if draw.random() < 0.6 else {}  # from which a frozen parameter comes back as it was
        keys = dtypes | draw.choice(CUTS), others | draw.choice(CUTS)
        try:
            require_carried(first, second, make, keys)
        except Exception as error:
            raise AssertionError(f"{first} to {second}, {make.__name__}, {keys}: {error}") from error


@lamina.step
def train_gpt(model, tokens):
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    model.backward(loss)
    return loss


def case_hugging_face_loads_a_model_that_was_trained_in_parts():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=101, n_positions=8)
    tokens = torch.randint(101, (ROWS, 8), generator=torch.Generator().manual_seed(1))
    for layout in some(("pp2 dp2", "sharded 4"), 1):
        with folder() as path:
            lamina.init(microbatches=1, timeout_s=60, **LAYOUTS[layout])
            model = lamina.DistributedModel(GPT2LMHeadModel(config))
            optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            train_gpt(model, tokens[: ROWS // lamina.dp_size()])
            optimizer.step()
            lamina.save_checkpoint(path, "gpt", partial=False)
            plain = GPT2LMHeadModel(config)
            plain.load_state_dict(model.state_dict())
            loaded = GPT2LMHeadModel.from_pretrained(path / "gpt")
            with torch.no_grad():
                require_same(loaded.eval()(tokens).logits, plain.eval()(tokens).logits)
            lamina.shutdown()
