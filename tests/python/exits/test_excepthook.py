# SPDX-License-Identifier: Apache-2.0
"""The hook for errors that nobody catches, beside the hooks of others."""

import sys

import pytest

from lamina.exits import excepthook


@pytest.fixture
def shown(monkeypatch):
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    yield shown
    excepthook.remove()


def put_another_before() -> None:
    """As torch does when a process group is made."""
    before = sys.excepthook
    sys.excepthook = lambda *error: before(*error)


def raise_it() -> BaseException:
    error = ValueError("x")
    sys.excepthook(type(error), error, None)
    return error


def test_jobs_in_a_row_show_an_error_once_though_others_put_their_hooks_before(shown):
    for _ in range(3):
        excepthook.install()
        put_another_before()
        excepthook.remove()
    excepthook.install()
    assert shown == [raise_it()]


def test_it_goes_where_nobody_came_after_it(shown):
    before = sys.excepthook
    excepthook.install()
    excepthook.install()
    excepthook.remove()
    assert sys.excepthook is before


def test_installed_twice_with_another_between_it_acts_once(shown):
    excepthook.install()
    put_another_before()
    excepthook.install()
    assert shown == [raise_it()]


def test_hooks_of_earlier_jobs_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = sys.excepthook
    for _ in range(3):
        excepthook.install()
        ours = sys.excepthook
        sys.excepthook = lambda *error, ours=ours: ours(*error)  # of torch's group, which goes after
        excepthook.remove()
        sys.excepthook = ours
    excepthook.install()
    assert sys.excepthook.previous is before
    excepthook.remove()
