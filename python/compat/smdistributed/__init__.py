# SPDX-License-Identifier: Apache-2.0
"""The names that scripts written for model parallelism import. All of them are lamina's own objects."""
