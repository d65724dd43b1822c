# SPDX-License-Identifier: Apache-2.0
from lamina import barrier as barrier
from lamina import dp_barrier as dp_barrier
from lamina import mp_barrier as mp_barrier
