# SPDX-License-Identifier: Apache-2.0
"""The end of a process, and errors that travel between ranks."""
