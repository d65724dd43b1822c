# SPDX-License-Identifier: Apache-2.0
"""Trains until one rank raises: raises.py WHAT PLACE RANK [group | thread].

WHAT is an expression, PLACE one of body, forward, backward. With "group" the program makes a process group of its own,
whose hook for exceptions is then around lamina's; with "thread" it has a thread that never ends.
"""

import os
import sys
import threading

import told
import torch
from training import spread, train_step

import lamina

WHAT, PLACE, RAISER = sys.argv[1], sys.argv[2], int(sys.argv[3])
FATAL_STEP = 3


class MyError(Exception):
    pass


def reaches(place):
    if place == PLACE and Layer.step == FATAL_STEP and lamina.rank() == RAISER:
        raise eval(WHAT)


class Layer(told.Layer):
    def reaches(self, place):
        reaches(place)


def main():
    size = int(os.environ["WORLD_SIZE"])
    lamina.init(partitions=size, microbatches=4, auto_partition=False, default_partition=0)
    if "group" in sys.argv:
        torch.distributed.init_process_group("gloo")
    if "thread" in sys.argv:
        lamina.exits.excepthook.THREADS_END_S = 1.0
        threading.Thread(target=threading.Event().wait, name="endless").start()
    model = spread([Layer(4, 4) for _ in range(2 * size)], size)
    train = train_step(model, lambda: reaches("body"))

    for Layer.step in range(10):
        train(torch.randn(8, 4))


if __name__ == "__main__":
    main()
