# SPDX-License-Identifier: Apache-2.0
"""The current job: its ranks, groups, messages and seed."""
