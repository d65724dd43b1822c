# SPDX-License-Identifier: Apache-2.0
"""What the engine calls back, handed to it when the package is imported."""

from lamina import _lamina, adapter, call_sites, codec, failures
from lamina.errors import ENGINE_ERRORS

_lamina.set_hooks(
    run_module=adapter.run_module,
    capture_state=adapter.capture_state,
    describe_exception=failures.describe,
    rebuild_exception=failures.rebuild,
    pack=codec.pack,
    unpack=codec.unpack,
    name_call=call_sites.name_call,
    errors=ENGINE_ERRORS,
)
