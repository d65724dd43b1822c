# SPDX-License-Identifier: Apache-2.0
from lamina.nn import *  # noqa: F403
from smdistributed.modelparallel.torch.nn import huggingface as huggingface
