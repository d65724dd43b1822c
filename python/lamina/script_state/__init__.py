# SPDX-License-Identifier: Apache-2.0
"""State of a script: what its objects and functions can reach, what that holds, and who reads and writes it."""
