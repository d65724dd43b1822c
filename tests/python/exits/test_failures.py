# SPDX-License-Identifier: Apache-2.0
"""Exceptions that come from other ranks."""

import json
import pickle
import sys

import pytest
import torch

import lamina
from lamina import _lamina
from lamina.exits import failures
from lamina.util import told


class OddError(ValueError):
    """Its __init__ takes what its args do not hold."""

    def __init__(self, number, *, color):
        super().__init__(f"{number} is {color}")
        self.color = color


class DerivedError(FileNotFoundError):
    def __init__(self, name):
        super().__init__(2, "not there", name)


def met(exception, rank=3):
    """The failure that `exception`, raised on `rank`, is."""
    try:
        raise exception
    except BaseException as caught:
        return failures.describe(caught, rank)


@pytest.mark.parametrize(
    "exception",
    [
        ValueError("x"),
        KeyError("k"),
        FileNotFoundError(2, "no such file", "name"),
        UnicodeDecodeError("utf8", b"a", 0, 1, "reason"),
        StopIteration(3),
        MemoryError("m"),
        ImportError("i", name="module"),
        json.JSONDecodeError("m", "doc", 1),
        OddError(3, color="red"),
        DerivedError("name"),
        lamina.UsageError("u"),
        lamina.UsageError("u\nmore", code="step-nested"),
        lamina.InternalError.found("x"),
        lamina.ConfigError("c"),
        lamina.PeerError("p"),
        lamina.TimeoutError("t"),
    ],
    ids=lambda exception: type(exception).__name__,
)
def test_the_type_is_kept(exception):
    failure = met(exception)
    error = failures.rebuild(*failure)
    assert isinstance(error, lamina.RemoteError) and isinstance(error, type(exception))
    assert type(error).__name__ == type(exception).__name__
    assert error.args == exception.args
    assert str(error).startswith(str(exception))
    assert error.rank == 3
    assert "in met" in error.remote_traceback
    for name, value in vars(exception).items():
        assert getattr(error, name) == value


def test_a_code_ends_the_first_line_of_the_message_and_travels():
    error = lamina.PeerError("gone\n  since then", code="group-lost")
    assert str(error) == "gone [group-lost]\n  since then\nmore: lamina explain group-lost"
    assert lamina.TimeoutError("late", code="group-late").code == "group-late"
    assert (lamina.UsageError("u").code, str(lamina.UsageError("u"))) == ("", "u")
    assert failures.rebuild(*met(lamina.DesyncError("apart", code="step-mismatch"))).code == "step-mismatch"


def test_an_error_of_the_engine_brings_its_code():
    tensor = torch.ones(2)
    _lamina.release(tensor, "0.weight lives in partition 1 on rank 1; call its module", torch.empty(2))
    with pytest.raises(
        lamina.UsageError, match=r"\[model-value-elsewhere\]\nmore: lamina explain model-value-elsewhere$"
    ) as caught:
        tensor.sum()
    assert caught.value.code == "model-value-elsewhere"


def test_a_bug_of_ours_is_not_told_as_an_error_of_the_callers():
    with pytest.raises(
        lamina.InternalError, match=r"a bug of lamina: .*\(lamina/value/released.cc:\d+\); report"
    ) as caught:
        _lamina.restore(torch.ones(2), torch.ones(2))
    assert not isinstance(caught.value, lamina.UsageError)


def test_what_is_no_utf8_is_escaped_where_words_travel():
    _, message, words, *_ = failure = met(ValueError("caf\udce9.txt"))
    assert message == r"caf\udce9.txt"
    assert words.endswith("ValueError: caf\\udce9.txt\n")
    assert failures.rebuild(*failure).args == ("caf\udce9.txt",)


def test_the_parts_of_builtin_exceptions_are_kept():
    error = failures.rebuild(*met(FileNotFoundError(2, "no such file", "name")))
    assert (error.errno, error.filename) == (2, "name")


def test_the_other_ranks_traceback_is_shown_once():
    error = failures.rebuild(*met(ValueError("x")))
    again = failures.rebuild(*failures.describe(error, 1))
    shown = "\n".join(again.__notes__) if sys.version_info >= (3, 11) else str(again)
    assert shown.count("raised on rank 3") == 1 and shown.count("in met") == 1


def test_a_failure_passed_on_stays_the_one_it_was():
    failure = met(OddError(3, color="red"))
    assert failures.describe(failures.rebuild(*failure), 1) == failure


def test_what_cannot_be_pickled_is_named():
    class LocalError(Exception):
        pass

    error = failures.rebuild(*met(LocalError("reason")))
    assert type(error) is lamina.RemoteError
    assert "LocalError: reason" in str(error) and error.rank == 3


def test_attributes_that_cannot_be_pickled_are_left_behind():
    exception = ValueError("x")
    exception.handle = lambda: None
    error = failures.rebuild(*met(exception))
    assert isinstance(error, ValueError) and error.args == ("x",) and not hasattr(error, "handle")


def test_arguments_that_cannot_be_pickled_become_the_message():
    error = failures.rebuild(*met(ValueError(lambda: None)))
    assert isinstance(error, ValueError) and "<lambda>" in str(error)


@pytest.mark.parametrize("exception", [SystemExit(3), KeyboardInterrupt()])
def test_the_end_of_another_process_does_not_end_this_one(exception):
    error = failures.rebuild(*met(exception))
    assert type(error) is lamina.RemoteError and type(exception).__name__ in str(error)


def test_nonsense_in_place_of_a_pickle_is_survived():
    error = failures.rebuild("ValueError", "x", "", 1, b"nonsense")
    assert type(error) is lamina.RemoteError and str(error).startswith("ValueError: x")


def test_a_rebuilt_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(failures.rebuild(*met(OddError(3, color="red")))))
    assert (
        isinstance(error, OddError)
        and isinstance(error, lamina.RemoteError)
        and error.color == "red"
        and error.rank == 3
    )


@pytest.mark.parametrize("text", ["\x1b[31mred\a", "a\0b", "\u009b31m", "\u202egnp", "\udc9b"])
def test_nothing_that_a_terminal_obeys_is_in_an_error_of_ours(text, capsys):
    for kind in (lamina.UsageError, lamina.FormatError, lamina.FileError, lamina.ConfigError):
        assert str(kind(f"one {text} two", code="state-names")).replace("\n", "").isprintable()
    error = lamina.UsageError(f"first\n\t{text}")
    assert str(error).startswith("first\n\t") and str(error)[7:].isprintable()
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == str(lamina.UsageError(str(error)))
    foreign = failures.rebuild(*met(ValueError(text)))
    assert all(line.isprintable() for line in "".join(foreign.__notes__).split("\n"))
    told.tell(text)
    assert capsys.readouterr().err[:-1].isprintable()
