# SPDX-License-Identifier: Apache-2.0
"""Modules placed by hand."""

import copy
import pickle
import threading

import pytest
from torch import nn

import lamina
from lamina.modules import placement


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        with lamina.partition(1):
            self.first = nn.Linear(1, 1)
            with lamina.partition(2):
                self.second = nn.Sequential(nn.Linear(1, 1))
            self.third = nn.Linear(1, 1)
        self.fourth = nn.Linear(1, 1)


def placed(model):
    return [
        placement.of(part) for part in (model, model.first, model.second[0], model.second, model.third, model.fourth)
    ]


def test_the_innermost_context_counts():
    assert placed(Model()) == [None, 1, 2, 2, 1, None]


def test_nothing_of_it_remains_outside_contexts():
    original = nn.Module.__init__  # torch's, or that of its compiler, where another test has compiled something
    Model()
    assert nn.Module.__init__ is original
    with pytest.raises(ZeroDivisionError), lamina.partition(1):
        assert nn.Module.__init__ is not original
        _ = 1 / 0
    assert nn.Module.__init__ is original


def test_other_threads_are_not_in_the_context():
    made = []
    with lamina.partition(1):
        thread = threading.Thread(target=lambda: made.append(nn.Linear(1, 1)))
        thread.start()
        thread.join()
    assert placement.of(made[0]) is None


def test_copies_keep_it():
    assert placed(copy.deepcopy(Model())) == placed(pickle.loads(pickle.dumps(Model()))) == placed(Model())


def test_it_does_not_show_in_the_state():
    assert list(Model().state_dict()) == list(nn.ModuleDict(Model().named_children()).state_dict())


def test_set_partition_holds_for_all_under_a_module_without_their_own():
    model = Model()
    lamina.set_partition(model.third, 3)
    lamina.set_partition(model, 0)
    assert placed(model) == [0, None, None, None, 3, None], "None follows the nearest module above"


@pytest.mark.parametrize("index", [-1, 1.0, "1", True, None])
def test_what_is_no_index(index):
    with pytest.raises(lamina.UsageError, match="integer from 0"), lamina.partition(index):
        pass
    with pytest.raises(lamina.UsageError, match="integer from 0"):
        lamina.set_partition(nn.Linear(1, 1), index)


def test_set_partition_places_modules_only():
    with pytest.raises(lamina.UsageError, match="not list"):
        lamina.set_partition([nn.Linear(1, 1)], 0)


def test_without_a_launcher_every_index_is_0():
    model = Model()
    with pytest.warns(UserWarning):
        lamina.init(partitions=3, auto_partition=False, default_partition=2)
    assert placed(model) == [None, 0, 0, 0, 0, None]
    assert placed(Model()) == [None, 0, 0, 0, 0, None]
    lamina.set_partition(model, 2)
    assert placement.of(model) == 0


def test_contexts_do_not_count_where_lamina_places_and_set_partition_does():
    model = Model()
    lamina.set_partition(model.fourth, 1)
    lamina.init(microbatches=2)
    assert placed(model) == [None, None, None, None, None, 0]
    assert placed(Model()) == [None] * 6
    with lamina.partition(7):  # the script was written for more partitions
        assert placement.of(nn.Linear(1, 1)) is None
    with pytest.raises(lamina.UsageError, match="integer from 0"), lamina.partition(-1):
        pass
    (line,) = placement.ignored(model.modules())
    assert line.startswith("4 modules were created in partition() contexts, which auto_partition ignores")
    assert placement.ignored(nn.Linear(1, 1).modules()) == []


def test_contexts_that_count_are_not_said_to_be_ignored():
    with pytest.warns(UserWarning):
        lamina.init(partitions=3, auto_partition=False, default_partition=2)
    assert placement.ignored(Model().modules()) == []
