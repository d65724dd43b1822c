# SPDX-License-Identifier: Apache-2.0
"""States of models, and files of them."""
