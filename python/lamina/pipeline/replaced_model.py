# SPDX-License-Identifier: Apache-2.0
"""A model in which marked modules have become others, and the names of its weights before and after."""

import functools

from torch import nn

from lamina.deferred_init import delayed
from lamina.job import current
from lamina.layers import hugging_face
from lamina.libraries.replacements import module_manager
from lamina.modules import placement
from lamina.tensor_parallel import correspondence, replacing


def make(module: nn.Module, job: current.Job) -> replacing.Replaced:
    """Replaces what is marked, and knows until the job ends how names are translated."""
    replaced = replacing.replace(module, job.session, hugging_face.registration_of, delayed.cut)
    for original, result in replaced.modules:
        placement.carry(original, result)
    for name, rows in replaced.rows.items():
        prefix = f"{name}." if name else ""
        pair = tuple(
            functools.partial(translate, rows, prefix=prefix)
            for translate in (correspondence.to_original, correspondence.from_original)
        )
        module_manager.translate_functions.append(pair)
        job.on_end.callback(module_manager.translate_functions.remove, pair)
    return replaced
