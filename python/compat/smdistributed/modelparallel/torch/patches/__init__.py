# SPDX-License-Identifier: Apache-2.0
from smdistributed.modelparallel.torch.patches import checkpoint as checkpoint
