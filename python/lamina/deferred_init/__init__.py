# SPDX-License-Identifier: Apache-2.0
"""Models whose parameters get their values later."""
