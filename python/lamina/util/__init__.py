# SPDX-License-Identifier: Apache-2.0
"""Small things that every package may use."""
