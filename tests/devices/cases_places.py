# SPDX-License-Identifier: Apache-2.0
"""Devices of two ranks of one machine."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from devices.cases_choices import environment
from multiprocess.cases_refusals import is_refused
from multiprocess.steps import said_on_stderr

import lamina
from lamina.errors import ConfigError


def case_each_rank_has_a_device_of_its_own():
    with said_on_stderr() as said:
        lamina.init(timeout_s=60)
    assert lamina.device() == torch.device("emulated", lamina.rank())
    assert "idle" not in said[0]


def case_two_ranks_on_one_device_while_another_is_idle_are_told_once():
    with said_on_stderr() as said:
        lamina.init(device="emulated:1", timeout_s=60)
    assert lamina.allgather(said[0].count("compute on one device"), lamina.WORLD) == [1, 0]
    if lamina.rank() == 0:
        assert "ranks 0, 1 compute on one device, emulated:1, while emulated:0 of their machine is idle" in said[0]


def case_ranks_with_devices_of_other_types_are_one_error_on_all():
    with pytest.raises(ConfigError, match='device: "emulated" and "cpu"'):
        lamina.init(device="cpu" if int(os.environ["RANK"]) else "gpu", timeout_s=60)


def case_a_device_of_a_third_in_a_call_of_another_rank_is_named_with_its_argument():
    with environment(LAMINA_DEVICE="cpu"):
        is_refused(
            lambda there, x: there(x.to("emulated:1")),
            "argument 0 of 1, which lives on another rank, a tensor on emulated:1, cannot go to another rank",
        )


class Strays(torch.nn.Module):
    """Gives a result that lies on a device of another rank."""

    def forward(self, x):
        return {"here": x * 1, "strayed": x.to("emulated:3")}


def case_a_result_on_a_third_device_is_named():
    lamina.init(partitions=2, timeout_s=60, auto_partition=False, default_partition=0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Strays())
    lamina.set_partition(model[1], 1)
    model = lamina.distribute(model)

    @lamina.step
    def run(x):
        return model(x)["here"]

    says = "result 'strayed' of .*, which another rank called, a tensor on emulated:3, cannot go to another rank"
    with pytest.raises(lamina.UsageError, match=says):
        run(torch.ones(4, 4))


def case_a_model_that_is_on_a_third_device_goes_to_those_of_its_ranks():
    torch.manual_seed(lamina.dist.get_global_rank())  # other values on each rank: the first one's count
    lamina.init(partitions=2, timeout_s=60)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    model[1].to("emulated:3")
    model = lamina.distribute(model)

    @lamina.step
    def run(x):
        y = model(x)
        model.backward(y.sum())
        return y

    y = run(torch.ones(4, 4)).concat()
    assert {each.device for each in model.local_parameters()} == {lamina.device()}
    if lamina.rank() == 0:
        torch.testing.assert_close(y.cpu(), plain(torch.ones(4, 4)), rtol=1e-5, atol=1e-6)


def case_a_device_travels_as_the_ranks_also_in_objects_that_are_pickled():
    lamina.init(timeout_s=60)
    own, host = lamina.device(), torch.device("cpu")
    for value in ({"of": own, "host": host}, SimpleNamespace(of=own, host=host, x=torch.full((2,), 1.0, device=own))):
        for got in lamina.allgather(value, lamina.WORLD):
            got = vars(got) if isinstance(got, SimpleNamespace) else got
            assert (got["of"], got["host"]) == (own, host)
            assert got.get("x", torch.ones(1, device=own)).device == own
