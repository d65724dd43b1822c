# SPDX-License-Identifier: Apache-2.0
"""A model that is cut, with the owner of each of its parts."""
