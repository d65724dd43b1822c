# SPDX-License-Identifier: Apache-2.0
"""Other libraries, as far as lamina knows them."""
