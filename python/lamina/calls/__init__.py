# SPDX-License-Identifier: Apache-2.0
"""Calls of a cut model's modules on other ranks: what travels besides tensors, and what is checked."""
