# SPDX-License-Identifier: Apache-2.0
"""Several copies of a model."""
