# SPDX-License-Identifier: Apache-2.0
"""The model and the step functions that a script calls."""
