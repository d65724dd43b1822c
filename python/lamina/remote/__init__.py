# SPDX-License-Identifier: Apache-2.0
"""Calls of modules on other ranks, as Python sees them."""
