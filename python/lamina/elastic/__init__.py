# SPDX-License-Identifier: Apache-2.0
"""Jobs that change their layout while they train."""
