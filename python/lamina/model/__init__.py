# SPDX-License-Identifier: Apache-2.0
"""A model that is cut: who owns which part of it."""
