# SPDX-License-Identifier: Apache-2.0
"""Layers that are cut over the ranks of a TP_GROUP wherever they are, and what becomes one of them."""
