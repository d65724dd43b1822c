# SPDX-License-Identifier: Apache-2.0
"""Horovod's names, over the copies of the model that lamina's job has."""

from lamina.tensorflow.hvd import Average as Average
from lamina.tensorflow.hvd import Sum as Sum
from lamina.tensorflow.hvd import allreduce as allreduce
from lamina.tensorflow.hvd import broadcast_variables as broadcast_variables
