# SPDX-License-Identifier: Apache-2.0
"""The settings that the current job was started with, and the modules that were replaced."""

from typing import Any

from lamina.integrations.replacements import module_manager as module_manager
from lamina.job import current

_ALIASES = {"pipeline": "schedule", "pipeline_parallel_degree": "partitions"}


class _CurrentConfig:
    """The keys of docs/configuration.md as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(current.session().config, _ALIASES.get(name, name))


cfg = _CurrentConfig()
