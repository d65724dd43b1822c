# SPDX-License-Identifier: Apache-2.0
"""The costs of a model, found out module by module."""
