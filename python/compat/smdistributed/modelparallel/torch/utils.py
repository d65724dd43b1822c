# SPDX-License-Identifier: Apache-2.0
from lamina.deferred_init.creation import get_distribution_axis as get_distribution_axis
