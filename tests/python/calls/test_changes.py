# SPDX-License-Identifier: Apache-2.0
"""Changes that a module made on another rank, made again in the caller's own objects."""

import collections
import dataclasses

import pytest
import torch

import lamina
from lamina.calls.changes import BorrowedArguments, CallResult, unpacked, write_back
from lamina.job import codec

TENSOR, OTHER = torch.ones(2), torch.zeros(2)


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    notes: dict = dataclasses.field(default_factory=dict)


class Slots:
    __slots__ = ("gone", "value")

    def __init__(self):
        self.value, self.gone = [1], 2

    def change(self):
        self.value.append(2)
        del self.gone


def travelled(value):
    """As it arrives on another rank; tensors are the same there."""
    return codec.unpack(*codec.pack(value))


def called(change, *args, borrowed=None):
    """A call of `change` on another rank, which changes all its arguments."""
    there = travelled(args)
    output = change(*there)
    changed = CallResult(output, dict(enumerate(there)))
    return write_back(unpacked(changed.packed()), args, {}, borrowed or BorrowedArguments())


CASES = {
    "append": ([1], lambda s: s.append(2), lambda s: s == [1, 2]),
    "clear": ([1, [2]], lambda s: s.clear(), lambda s: s == []),
    "deque": (collections.deque([1], 3), lambda s: s.append(2), lambda s: (list(s), s.maxlen) == ([1, 2], 3)),
    "item": ({"a": 1}, lambda s: s.update(a=2, b=3), lambda s: s == {"a": 2, "b": 3}),
    "order": (
        collections.OrderedDict(a=1, b=2),
        lambda s: s.move_to_end("a"),
        lambda s: list(s) == ["b", "a"],
    ),
    "set": ({1}, lambda s: s.add(2), lambda s: s == {1, 2}),
    "bytes": (bytearray(b"a"), lambda s: s.extend(b"b"), lambda s: s == b"ab"),
    "array": (TENSOR.numpy().copy(), lambda s: s.__setitem__(0, 5), lambda s: s.tolist() == [5, 1]),
    "in a tuple": ((1, [2]), lambda s: s[1].append(3), lambda s: s == (1, [2, 3])),
    "attribute": (State(TENSOR), lambda s: setattr(s, "hidden", OTHER), lambda s: s.hidden is OTHER),
    "slots": (Slots(), Slots.change, lambda s: s.value == [1, 2] and not hasattr(s, "gone")),
}


@pytest.mark.parametrize("state, change, is_right", CASES.values(), ids=CASES)
def test_the_callers_object_becomes_what_the_copy_became(state, change, is_right):
    assert not is_right(state)
    called(change, state)
    assert is_right(state)


def test_other_results_are_what_they_are():
    for result in (None, TENSOR, (TENSOR, TENSOR), (1, 2), []):
        assert unpacked(result) is None


def test_objects_inside_stay_the_same_objects():
    inner, notes = [1], {"inner": None}
    notes["inner"] = inner
    state = State(TENSOR, notes)
    called(lambda s: s.notes["inner"].append(2), state)
    assert state.notes is notes and notes["inner"] is inner and inner == [1, 2] and state.hidden is TENSOR


def test_an_object_that_holds_itself():
    state = [1]
    state.append(state)
    called(lambda s: s.append(2), state)
    assert state[1] is state and len(state) == 3


def test_a_changed_argument_in_the_result_is_the_callers():
    state = State(TENSOR)

    def change(s):
        s.notes["a"] = 1
        return {"state": s, "also": (s.notes, 5)}

    result = called(change, state)
    assert result["state"] is state and result["also"][0] is state.notes == {"a": 1}


def test_one_object_in_two_arguments_is_changed_once():
    shared = [1]
    first, second = [shared], {"a": shared}
    called(lambda a, _: a[0].append(2), first, second)
    assert first[0] is shared is second["a"] and shared == [1, 2]


def test_what_cannot_be_changed_in_place_is_an_error_with_a_remedy():
    there = (1, 2)
    with pytest.raises(lamina.UsageError, match=r"argument 0, of type tuple, .* return what changes"):
        write_back(CallResult(None, {0: there}), ((1, 3),), {}, BorrowedArguments())


def test_an_object_that_two_calls_have_may_not_be_changed_by_one():
    borrowed, state, other = BorrowedArguments(), [1], [1]
    with borrowed.lend([state]), borrowed.lend([state, other]):
        called(lambda s: s.append(2), other, borrowed=borrowed)
        with pytest.raises(lamina.UsageError, match="give each microbatch an object of its own"):
            called(lambda s: s.append(2), state, borrowed=borrowed)
    with borrowed.lend([state]):
        called(lambda s: s.append(2), state, borrowed=borrowed)
    assert other == state == [1, 2]
