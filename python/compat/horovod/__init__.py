# SPDX-License-Identifier: Apache-2.0
"""The names of Horovod that scripts for `smdistributed.modelparallel.tensorflow` import."""
