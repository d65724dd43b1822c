# SPDX-License-Identifier: Apache-2.0
"""Functions that the engine calls back, handed to it when the package is imported."""

from typing import Any

from lamina import _lamina, errors
from lamina.exits import failures
from lamina.job import codec, current
from lamina.pipeline import device_lines  # noqa: F401 -- says the lines of errors of devices
from lamina.remote import placed
from lamina.util import call_sites


def _run_module(number: int, state: bytes, args: tuple, kwargs: dict[str, Any]) -> Any:
    return current.job().routing.calls.run(number, state, args, kwargs)


def _capture_state(number: int) -> tuple[bytes, bytes]:
    return current.job().routing.calls.capture(number)


def _hear(news: bytes) -> None:
    current.job().routing.calls.hear(news)


_lamina.set_hooks(
    run_module=_run_module,
    capture_state=_capture_state,
    hear=_hear,
    describe_exception=failures.describe,
    rebuild_exception=failures.rebuild,
    pack=codec.pack,
    unpack=codec.unpack,
    name_call=call_sites.name_call,
    make_remote=placed.make_remote,
    errors=errors,
)
