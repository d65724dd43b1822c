# SPDX-License-Identifier: Apache-2.0
"""The watch of a script's state, of which nothing is left when it is dropped."""

import gc
import weakref

from torch import nn

from lamina.calls.remote_call import CallState
from lamina.shared_state.watch import Watch

ORIGINAL = nn.Module.__setattr__


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = [0]


def installed(module: nn.Module) -> Watch:
    watch = Watch()
    owned, elsewhere = [("", module, 0)], {}.get
    watch.install(module, nn.Identity(), owned, 0, elsewhere, waited=(), homes=[(0, "count", 1)], in_turns=lambda: True)
    return watch


def test_a_watch_that_is_dropped_has_left_nothing():
    watch = installed(Counting())
    assert {"seen", "count"} <= vars(Counting).keys(), "attributes are watched"
    assert nn.Module.__setattr__ is not ORIGINAL
    watch.remove()
    assert not {"seen", "count"} & vars(Counting).keys()
    assert nn.Module.__setattr__ is ORIGINAL
    dropped = weakref.ref(watch)
    del watch
    gc.collect()
    assert dropped() is None, "no global keeps it"


def test_what_somebody_puts_around_settings_is_called_once_by_the_next_watch(monkeypatch):
    module, seen = Counting(), []
    watch = installed(module)
    ours = nn.Module.__setattr__
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__setattr__", lambda self, name, value: seen.append(name) or ours(self, name, value))
        watch.remove()
        watch = installed(module)
        module.other = 3
        watch.remove()
        module.other = 4
    nn.Module.__setattr__ = ORIGINAL
    assert (module.other, seen) == (4, ["other", "other"])


def test_equal_states_of_calls_are_equal_as_they_travel():
    flags = bytes(3)
    one = CallState(1, flags, flags, 2, b"", None)  # one object in two fields
    other = CallState(1, bytes([0, 0, 0]), b"\0\0\0", 2, b"", None)
    assert one.to_bytes() == other.to_bytes()
    assert CallState.from_bytes(one.to_bytes()) == other
    assert one.to_bytes() != one._replace(conversion=3).to_bytes()
