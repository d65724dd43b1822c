# SPDX-License-Identifier: Apache-2.0
"""Activations that are computed again in the backward."""
