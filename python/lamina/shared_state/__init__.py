# SPDX-License-Identifier: Apache-2.0
"""State of a script that ranks, or microbatches that take turns, would each see in another way."""
