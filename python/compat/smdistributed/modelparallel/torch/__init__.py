# SPDX-License-Identifier: Apache-2.0
"""lamina under the names of `smdistributed.modelparallel.torch`."""

import functools

import lamina
from lamina import *  # noqa: F403
from smdistributed.modelparallel.torch import amp as amp
from smdistributed.modelparallel.torch import core as core
from smdistributed.modelparallel.torch import model as model
from smdistributed.modelparallel.torch import nn as nn
from smdistributed.modelparallel.torch import optimizers as optimizers
from smdistributed.modelparallel.torch import patches as patches
from smdistributed.modelparallel.torch import state_mod as state_mod
from smdistributed.modelparallel.torch import utils as utils

save_checkpoint = functools.partial(lamina.save_checkpoint, form="smp")
resume_from_checkpoint = functools.partial(lamina.resume_from_checkpoint, allow_pickle=True)

# Marked modules become the original's classes.
model_creation = functools.partial(lamina.model_creation, replace=True)
set_tensor_parallelism = functools.partial(lamina.set_tensor_parallelism, replace=True)
tensor_parallelism = functools.partial(lamina.tensor_parallelism, replace=True)


def __getattr__(name: str) -> object:
    return getattr(lamina, name)
