# SPDX-License-Identifier: Apache-2.0
from lamina import state as state
