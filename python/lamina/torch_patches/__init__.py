# SPDX-License-Identifier: Apache-2.0
"""Everything that replaces something of torch's."""
