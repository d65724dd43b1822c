# SPDX-License-Identifier: Apache-2.0
"""Trains until one rank is frozen (SIGSTOP): frozen.py RANK PLACE PARTITIONS TIMEOUT_S.

PLACE is one of body, forward, backward, reduction, between. Times and errors are noted as in victim.py.
"""

import os
import signal
import sys

import told
import torch
from training import call_before_reductions, spread, train_step
from victim import note, noted

import lamina

VICTIM, PLACE, PARTITIONS, TIMEOUT_S = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
FATAL_STEP = 3


def reaches(place):
    if place == PLACE and Layer.step == FATAL_STEP and lamina.rank() == VICTIM and "FROZEN" not in os.environ:
        # The signal stops this thread a moment later. An attribute that ranks share would be an error until then.
        os.environ["FROZEN"] = "1"
        note("death", "")
        os.kill(os.getpid(), signal.SIGSTOP)


class Layer(told.Layer):
    def reaches(self, place):
        reaches(place)


def main():
    call_before_reductions(lambda: reaches("reduction"))
    lamina.init(
        partitions=PARTITIONS,
        microbatches=4,
        ddp=True,
        timeout_s=TIMEOUT_S,
        auto_partition=False,
        default_partition=0,
    )
    model = spread([Layer(4, 4) for _ in range(2 * PARTITIONS)], PARTITIONS)
    train = train_step(model, lambda: reaches("body"))

    for Layer.step in range(1000):
        train(torch.randn(8, 4))
        reaches("between")


if __name__ == "__main__":
    noted(main)
