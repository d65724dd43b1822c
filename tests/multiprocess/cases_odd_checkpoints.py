# SPDX-License-Identifier: Apache-2.0
"""Cases for four ranks: checkpoints of odd models, with odd contents, in odd places."""

import copy
import datetime
import enum
import os
import pathlib
import time
import unittest.mock

import pytest
import torch
from multiprocess.cases_checkpoints import LAYOUTS, folder, require_same
from soak import SOAK
from torch import nn

import lamina
from lamina.checkpoints.checkpointed_job import CheckpointedJob


class Odd(nn.Module):
    """Parameters without elements, without dimensions, with gaps, without gradients, and complex; buffers of other
    dtypes, of which one is the conjugate of its memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.unused = nn.Parameter(torch.randn(3))
        self.complex = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.head = nn.Linear(4, 4)
        self.register_buffer("conjugate", torch.randn(4, dtype=torch.complex64).conj())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(2, 0, dtype=torch.int16))
        self.register_buffer("kept", torch.arange(3), persistent=False)

    def forward(self, x):
        turned = (x * self.complex * self.conjugate).real
        return self.head(turned @ self.transposed.t()[:4, :4]) * self.scalar + self.empty.sum()


class Job:
    """Its training."""

    def __init__(self, layout, module, make=torch.optim.AdamW):
        lamina.init(microbatches=2, timeout_s=30, **LAYOUTS[layout])
        self.model = lamina.DistributedModel(module)
        self.optimizer = lamina.DistributedOptimizer(make(self.model.parameters()))
        self.step = lamina.step(lambda x: self.model.backward(self.model(x).square().mean()))

    def train(self):
        self.step(torch.ones(4, 4))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def states(self):
        return self.model.state_dict(), self.optimizer.state_dict()


def carried(first, second, make):
    """Loads in the second layout what the first one has saved; both have the same states."""
    with folder() as path:
        job = Job(first, make())
        job.train()
        expected = job.states()
        lamina.save_checkpoint(path, "a")
        lamina.shutdown()
        job = Job(second, make())
        job.train()
        lamina.resume_from_checkpoint(path)
        require_same(job.states(), expected)
        job.train()


def case_odd_parameters_go_from_layout_to_layout():
    carried("dp4", "sharded 4", Odd)
    carried("sharded 2, two copies", "dp4 shared states", Odd)
    carried("pp4", "dp4", Odd)  # three of its partitions are empty


class Wide(nn.Module):
    """Many small parameters: thousands in a soak."""

    def __init__(self):
        super().__init__()
        self.all = nn.ParameterList(torch.full((3,), float(number)) for number in range(2000 if SOAK else 500))

    def forward(self, x):
        return x * sum(each.sum() for each in self.all)


def case_thousands_of_parameters_are_saved_and_loaded_in_seconds():
    with folder() as path:
        job = Job("dp4", Wide())
        job.train()
        expected = copy.deepcopy(job.states())
        lamina.save_checkpoint(path, "a")
        job.train()
        lamina.resume_from_checkpoint(path)
        require_same(job.states(), expected)


class Colour(enum.IntEnum):
    RED = 1


class Own(dict):
    pass


def case_contents_that_are_no_plain_data_are_refused_and_named_on_all_ranks():
    endless = []
    endless.append(endless)
    with folder() as path:
        job = Job("dp4", nn.Linear(4, 4))
        job.train()
        odd = (
            Own(a=1),
            datetime.datetime(2020, 1, 1),
            Colour.RED,
            object(),
            endless,
            torch.zeros(2, dtype=torch.cdouble),
        )
        for content in odd:
            with pytest.raises(lamina.UsageError):
                lamina.save_checkpoint(path, "a", user_content=[content])
            job.train()
        assert not [each for each in path.iterdir() if each.is_dir()]


def case_contents_of_numpy_and_views_are_what_they_were():
    import numpy as np

    whole = torch.arange(6.0)
    content = {
        "half": np.float16(0.5),
        "flag": np.bool_(True),
        "big": np.arange(6, dtype=">i4").reshape(2, 3),
        "backwards": np.arange(4)[::-1],
        "scalar": np.array(3.0),
        "views": (whole, whole[2:4], whole.view(2, 3).t()),
        "parameter": nn.Parameter(torch.ones(2)),
        "path": pathlib.PurePosixPath("a/b"),
        "nan": [float("nan"), -0.0, 2**63, -(2**63) - 1],
        "empty": ((), [], {}, "", b"", torch.zeros(0, 2)),
        "keys": {"dict": 1, None: 2, 1.5: 3, (): 4, frozenset({5}): 5, (1j, range(3)): 6},
        "digits": [10**5000, -(10**5000)],
        "negated": torch.tensor([1 + 2j]).conj().imag,  # a view that turns signs as it is read
    }
    with folder() as path:
        job = Job("dp4", nn.Linear(4, 4))
        job.train()
        lamina.save_checkpoint(path, "a", user_content=content)
        found = lamina.resume_from_checkpoint(path)
    for name in ("big", "backwards", "scalar"):
        assert np.array_equal(found[name], content[name]) and found[name].shape == content[name].shape, name
    assert found["half"] == content["half"] and type(found["half"]) is np.float16
    assert found["flag"] == np.True_ and type(found["flag"]) is np.bool_
    require_same(found["views"], content["views"])
    assert torch.equal(found["parameter"], content["parameter"])
    assert str(found["path"]) == "a/b"
    assert str(found["nan"]) == str(content["nan"])
    require_same(found["empty"], content["empty"])
    assert found["digits"] == content["digits"]
    assert found["negated"].tolist() == [-2.0]
    assert list(found["keys"].items()) == list(content["keys"].items())


def case_tags_are_of_any_script_and_no_paths():
    with folder() as path:
        job = Job("dp4", nn.Linear(4, 4))
        job.train()
        for tag in ("a b", "ключ", "鍵" * 60, "x.y-z_partial", "-n", "%s{}'\""):
            lamina.save_checkpoint(path, tag, user_content=tag)
            assert lamina.resume_from_checkpoint(path) == tag
            assert lamina.resume_from_checkpoint(path, tag) == tag
        for tag in ("", "..", "../a", "a/b", "é" * 100, ".a", "line\nline"):
            with pytest.raises(lamina.UsageError, match="no tag"):
                lamina.save_checkpoint(path, tag)


def case_a_relative_folder_is_that_of_the_first_rank_wherever_the_others_are():
    before = pathlib.Path.cwd()
    with folder() as path:
        job = Job("dp4", nn.Linear(4, 4))
        job.train()
        elsewhere = path / f"rank {lamina.rank()}"
        elsewhere.mkdir()
        try:
            os.chdir(elsewhere)
            handle = lamina.save_checkpoint("check points", "a", user_content=1, asynchronous=True)
            os.chdir(before)
            handle.wait()
            os.chdir(elsewhere)
            assert lamina.resume_from_checkpoint("check points") == 1
        finally:
            os.chdir(before)
        assert (path / "rank 0" / "check points" / "a_partial").is_dir()
        lamina.barrier()


def case_an_error_of_an_asynchronous_save_is_raised_once_on_every_rank():
    with folder() as path:
        job = Job("dp4", nn.Linear(4, 4))
        job.train()
        # The folder of this one is gone before its end, which only the first rank meets.
        handle = lamina.save_checkpoint(path, "a", user_content=torch.zeros(1 << 20), asynchronous=True)
        if lamina.rank() == 0:
            for each in path.glob("a_partial.tmp-*"):
                each.rename(path / "moved")
        with pytest.raises(lamina.Error):
            handle.wait()
        assert handle.done()
        job.train()
        lamina.save_checkpoint(path, "b")


def case_an_error_of_an_asynchronous_save_is_raised_before_the_same_step_on_every_rank():
    with folder() as path:
        job = Job("pp2 dp2", nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
        job.train()
        for tag in "abcde":
            lamina.save_checkpoint(path, tag, user_content=torch.zeros(1 << 18), asynchronous=True)
            if lamina.rank() == 0:
                for each in path.glob(f"{tag}_partial.tmp-*"):
                    each.rename(path / f"moved {tag}")
            steps = 0
            with pytest.raises(lamina.Error, match="tmp-"):
                while True:
                    job.train()
                    steps += 1
            assert len(set(lamina.allgather(steps, lamina.CommGroup.WORLD))) == 1
        job.train()
        lamina.save_checkpoint(path, "f")


def case_one_rank_that_cannot_say_what_it_saves_is_an_error_on_all():
    class Refuses(nn.Linear):
        def get_extra_state(self):
            if lamina.rank() == 2:
                raise ZeroDivisionError("no state")
            return time.time

    with folder() as path:
        job = Job("dp4", Refuses(4, 4))
        job.train()
        with pytest.raises((ZeroDivisionError, lamina.UsageError), match="no state"):
            lamina.save_checkpoint(path, "a")
        assert not list(path.iterdir())
        job.train()


class Stateful(nn.Linear):
    extra = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def case_extra_states_of_modules_that_take_none_change_nothing_or_are_left_out():
    with folder() as path:
        job = Job("dp4", nn.Sequential(Stateful(4, 4)))
        job.train()
        lamina.save_checkpoint(path, "a")
        lamina.shutdown()
        job = Job("dp4", nn.Sequential(nn.Linear(4, 4)))
        job.train()
        before = copy.deepcopy(job.states())
        with pytest.raises(lamina.UsageError, match=r"extra states of modules that take none here: \['0'\]"):
            lamina.resume_from_checkpoint(path)
        require_same(job.states(), before)
        lamina.resume_from_checkpoint(path, strict=False)
        job.train()


def case_states_of_generators_that_are_none_change_nothing():
    with folder() as path:
        job = Job("dp4", nn.Linear(4, 4))
        job.train()
        for states in ({"python": 3}, {"python": (3, (1, 2), None)}, {"numpy": ("MT19937", 3, 4, 5, 6.0)}, [1]):
            with unittest.mock.patch.object(CheckpointedJob, "generators", lambda job, states=states: states):
                lamina.save_checkpoint(path, "a")
            job.train()
            before = copy.deepcopy((*job.states(), torch.get_rng_state()))
            with pytest.raises(lamina.FormatError, match=r"generators|by names"):
                lamina.resume_from_checkpoint(path)
            require_same((*job.states(), torch.get_rng_state()), before)


class Counting(torch.optim.SGD):
    """Has a state that is no parameter's, and an entry of its own in its state dict."""

    seen = 0

    def step(self, closure=None):
        self.seen += 1
        self.state["rounds"] = {"number": self.seen, "values": torch.full((2,), float(self.seen))}
        return super().step(closure)

    def state_dict(self):
        return super().state_dict() | {"seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]
        super().load_state_dict(state_dict)


def case_states_of_an_optimizer_that_are_of_no_parameter_are_there_again():
    for layout in ("dp4", "pp2 dp2"):
        with folder() as path:
            job = Job(layout, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lambda own: Counting(own, momentum=0.9))
            job.train()
            lamina.save_checkpoint(path, "a")
            lamina.save_checkpoint(path, "smp", form="smp")
            expected = copy.deepcopy((job.optimizer.state["rounds"], job.optimizer.seen, *job.states()))
            job.train()
            with pytest.raises(lamina.UsageError, match="checkpoint-optimizers"):
                lamina.resume_from_checkpoint(path, "smp")
            lamina.resume_from_checkpoint(path, "a")
            require_same((job.optimizer.state["rounds"], job.optimizer.seen, *job.states()), expected)


def case_what_waits_for_the_cut_is_not_passed_over():
    """Neither is a state that does not have it read, nor one loaded that it would undo."""
    with folder() as path:
        job = Job("pp2 dp2", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        job.train()
        expected = copy.deepcopy(job.states())
        lamina.save_checkpoint(path, "a")
        lamina.shutdown()
        job = Job("pp2 dp2", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        lamina.resume_from_checkpoint(path)
        refused = (
            job.model.state_dict,
            job.optimizer.state_dict,
            lambda: job.model.load_state_dict(expected[0]),
            lambda: job.optimizer.load_state_dict(expected[1]),
        )
        for call in refused:
            with pytest.raises(lamina.UsageError, match=r"a checkpoint waits .*state-before-cut"):
                call()
        job.step(torch.ones(4, 4))
        require_same(job.states(), expected)


def case_extra_states_are_unpickled_only_where_that_is_allowed():
    with folder() as path:
        model = Stateful(4, 4)
        model.extra = {"seen": 3}
        job = Job("dp4", model)
        job.train()
        lamina.save_checkpoint(path, "plain")
        model.extra = None
        lamina.resume_from_checkpoint(path, "plain")
        assert model.extra == {"seen": 3}
        model.extra = datetime.date(2001, 2, 3)
        with pytest.raises(lamina.UsageError, match="pickle"):
            lamina.save_checkpoint(path, "dated")
        lamina.save_checkpoint(path, "dated", allow_pickle=True)
        model.extra = None
        with pytest.raises(lamina.UsageError, match="allow_pickle=True"):
            lamina.resume_from_checkpoint(path, "dated")
        assert model.extra is None
        lamina.resume_from_checkpoint(path, "dated", allow_pickle=True)
        assert model.extra == datetime.date(2001, 2, 3)
