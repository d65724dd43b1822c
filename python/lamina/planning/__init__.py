# SPDX-License-Identifier: Apache-2.0
"""`lamina plan` for models in Python: their modules and costs, without ranks."""
