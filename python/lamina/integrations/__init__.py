# SPDX-License-Identifier: Apache-2.0
"""Loops of other libraries under which models train that lamina cuts; each imports its library."""
