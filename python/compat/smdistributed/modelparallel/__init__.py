# SPDX-License-Identifier: Apache-2.0
"""The interface whose names `smdistributed.modelparallel.torch` offers, by version; scripts compare it."""

__version__ = "1.15.0"
