# SPDX-License-Identifier: Apache-2.0
"""Layers that are cut over the ranks of a TP_GROUP: which, how, and what they compute then."""
