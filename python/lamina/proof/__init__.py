# SPDX-License-Identifier: Apache-2.0
"""Proofs that modules with sliced layers compute what whole ones do."""
