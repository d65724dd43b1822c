# SPDX-License-Identifier: Apache-2.0
"""The command `composer`: `lamina run`, which reads the same words."""
