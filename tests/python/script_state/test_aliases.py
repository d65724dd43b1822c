# SPDX-License-Identifier: Apache-2.0
"""One index of the ways that lead to a thing, by which a change counts for all of them."""

import numpy
import torch

from lamina.script_state.aliases import Aliases


def test_a_list_is_found_by_each_attribute_and_by_what_is_in_it():
    log, aliases = [], Aliases()
    for way, value in (("a", log), ("b", {"log": log}), ("c", [])):
        aliases.add(way, value)
    assert aliases.ways(log) == ["a", "b"] and aliases.ways([log]) == ["a", "b"]


def test_views_are_ways_to_one_array_and_to_one_memory():
    array, tensor, aliases = numpy.zeros(4), torch.zeros(4), Aliases()
    for way, value in (("a", array[:2]), ("b", array[2:]), ("c", tensor[:2]), ("d", [tensor])):
        aliases.add(way, value)
    assert aliases.ways(array) == ["a", "b"]
    assert aliases.ways(tensor) == aliases.ways_to_memory(tensor[3:]) == ["c", "d"]
    assert aliases.ways_to_memory(torch.zeros(4)) == []


def test_tensors_in_containers_count_where_they_are_asked_for():
    tensor, aliases = torch.zeros(4), Aliases(with_tensors=False)
    aliases.add("a", tensor)
    aliases.add("b", [tensor])
    assert aliases.ways(tensor) == ["a"]


def test_a_way_that_leads_to_a_thing_twice_counts_once():
    log, aliases = [], Aliases()
    aliases.add("a", [log, {"again": log}])
    assert aliases.ways(log) == ["a"] and id(log) in aliases.objects
