# SPDX-License-Identifier: Apache-2.0
"""The settings that the current job was started with, and the modules that were replaced."""

from typing import Any

from lamina.errors import UsageError
from lamina.job import current
from lamina.libraries.replacements import module_manager as module_manager

_ALIASES = {"pipeline": "schedule", "pipeline_parallel_degree": "partitions"}


class _CurrentConfig:
    """The keys of docs/configuration.md as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(current.session().config, _ALIASES.get(name, name))


cfg = _CurrentConfig()


def __getattr__(name: str) -> Any:
    """Tables of the job's last DistributedOptimizer, for each rank of the TP_GROUP: the names of the parameters in the
    groups of one partition, by their numbers there, and the numbers by name."""
    if name not in ("param_index_to_name_tp_group", "param_name_to_index_tp_group"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    job = current.job()
    if not job.optimizers:
        raise UsageError(f"state.{name}: there is no DistributedOptimizer yet", code="optimizer-no-model")
    names = job.optimizers[-1].local_names()
    table = dict(enumerate(names)) if name.startswith("param_index") else {name: n for n, name in enumerate(names)}
    return [dict(table) for _ in range(job.session.group_size("tp"))]
