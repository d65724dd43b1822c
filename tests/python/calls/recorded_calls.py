# SPDX-License-Identifier: Apache-2.0
"""Words that hooks around calls of modules hear: see tests/model/recorded_calls.h."""

from python.built import extension

from lamina.job import current


def record(*names):
    """Hooks of these modules, before the first step; take() gives what they have heard on this rank since."""
    return extension("call_recorder").record(current.session(), names)
