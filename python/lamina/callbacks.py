# SPDX-License-Identifier: Apache-2.0
"""Functions that the engine calls back, handed to it when the package is imported."""

from lamina import _lamina, errors
from lamina.calls import remote_call
from lamina.exits import failures
from lamina.job import codec
from lamina.remote import placed
from lamina.util import call_sites

_lamina.set_hooks(
    run_module=remote_call.run_module,
    capture_state=remote_call.capture_state,
    describe_exception=failures.describe,
    rebuild_exception=failures.rebuild,
    pack=codec.pack,
    unpack=codec.unpack,
    name_call=call_sites.name_call,
    make_remote=placed.make_remote,
    errors=errors,
)
