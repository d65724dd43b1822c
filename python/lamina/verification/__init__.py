# SPDX-License-Identifier: Apache-2.0
"""Runs that `lamina verify` compares."""
