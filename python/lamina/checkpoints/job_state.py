# SPDX-License-Identifier: Apache-2.0
"""Facts about a job that checkpoints of the form of the original tell."""

from lamina import _lamina


def layout(session: _lamina.Session) -> dict[str, int]:
    """How the ranks of a job share the work."""
    return {
        "pp": session.group_size("pp"),
        "tp": session.group_size("tp"),
        "rdp": session.group_size("rdp"),
        "sharded_data_parallel_degree": session.group_size("shard"),
        "world": session.size,
    }
