# SPDX-License-Identifier: Apache-2.0
"""The user's modules: their tree, and what is known of each before a model is cut."""
