# SPDX-License-Identifier: Apache-2.0
"""Names that scripts and command lines written for Composer use."""
