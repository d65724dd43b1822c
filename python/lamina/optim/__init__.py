# SPDX-License-Identifier: Apache-2.0
"""Optimizers of a model that is cut."""
