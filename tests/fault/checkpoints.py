# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints until something happens: checkpoints.py WHAT PARTITIONS TIMEOUT_S [WORD ...].

In the save of number n every parameter is n, and user_content is n; `begun` and `saved` are noted with n as victim.py
notes things, and errors, too. WHAT is a function of this file, which says what happens.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import reports
import torch
from torch import nn
from training import spread, train_step
from victim import note, noted

import lamina

WHAT, PARTITIONS, TIMEOUT_S, WORDS = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
FOLDER = Path(os.environ["DIR"], "checkpoints")
FATAL = 3  # the number of the save in which it happens
WIDTH = 256
KEPT = 2  # checkpoints, so that saves prune


class Training:
    """A model, mostly with AdamW, whose import takes long; and the saves of it."""

    def __init__(self, width=WIDTH, optimizes=True):
        lamina.init(partitions=PARTITIONS, ddp=True, timeout_s=TIMEOUT_S, auto_partition=False, default_partition=0)
        self.model = spread([nn.Linear(width, width) for _ in range(4)], PARTITIONS)
        self.optimizer = None
        if optimizes:
            self.optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(self.model.parameters()))
        self._width, self._step = width, train_step(self.model)
        self.train()
        reports.started.set()

    def train(self):
        self._step(torch.randn(8, self._width))
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def fill(self, number):
        with torch.no_grad():
            for parameter in self.model.local_parameters():
                parameter.fill_(number)

    def save(self, number, tag=None, folder=FOLDER, asynchronous=False):
        self.fill(number)
        note("begun", str(number))
        handle = lamina.save_checkpoint(
            folder,
            tag or f"save-{number}",
            user_content=number,
            num_kept_partial_checkpoints=KEPT,
            asynchronous=asynchronous,
        )
        if handle is None:
            note("saved", str(number))
        return handle

    def resume(self, folder=FOLDER):
        """The number of the save that is found, which all of it is of."""
        number = lamina.resume_from_checkpoint(folder)
        for parameter in self.model.local_parameters():
            assert (parameter == number).all(), parameter
        return number


def die():
    note("death", "")
    os.kill(os.getpid(), signal.SIGKILL)


def killed():
    """Saves and trains until rank WORDS[0], or each one with -1, is killed: in the save FATAL, or soon after it, at the
    part WORDS[1] of the time that the one before took. WORDS[2] is `synchronous` or not, WORDS[3] `one` tag or `new`
    ones."""
    victim, fraction = int(WORDS[0]), float(WORDS[1])
    asynchronous, tag = WORDS[2] != "synchronous", "last" if WORDS[3] == "one" else None
    job, took, handle = Training(), 0.0, None
    for number in range(1, 1000):
        if handle is not None:
            handle.wait()
            note("saved", str(number - 1))
        began = time.monotonic()
        if number == FATAL and victim in (-1, lamina.rank()):
            threading.Timer(fraction * took, die).start()
        handle = job.save(number, tag, asynchronous=asynchronous)
        if number < FATAL:
            if handle is not None:
                handle.wait()
            took = time.monotonic() - began
        job.train()


def next_job():
    """Resumes from what is there, of a model of the width WORDS[0] or the usual one, and saves once more."""
    job = Training(int((*WORDS, WIDTH)[0]))
    number = job.resume()
    job.save(number + 1)
    lamina.barrier()
    if lamina.rank() == 0:
        note("found", f"{number} {sorted(path.name for path in FOLDER.iterdir())}")
    lamina.shutdown()


def frozen():
    """Rank WORDS[0] stops in the second save, in which the disk is slow, a moment after its beginning."""
    job = Training(1024)
    job.save(1)
    if lamina.rank() == int(WORDS[0]):
        threading.Timer(0.5, lambda: (note("death", ""), os.kill(os.getpid(), signal.SIGSTOP))).start()
    job.save(2)


def absent():
    """Rank WORDS[0] does not save; WORDS[1] is `elsewhere` if it waits in a barrier meanwhile, else it sleeps."""
    job = Training()
    note("begun", "")
    if lamina.rank() != int(WORDS[0]):
        job.save(1)
    elif WORDS[1] == "elsewhere":
        lamina.barrier()
    else:
        time.sleep(600)


def slow():
    """Saves where the disk is slow, longer than TIMEOUT_S: as WORDS[0] says, `synchronous` or while it trains."""
    job = Training(1024, optimizes=WORDS[0] != "synchronous")
    began = time.monotonic()
    handle, steps = job.save(1, asynchronous=WORDS[0] != "synchronous"), 0
    while handle is not None and steps < 10 and not all(lamina.allgather(handle.done(), lamina.CommGroup.WORLD)):
        job.train()
        steps += 1
    if handle is not None:
        handle.wait()
    note("took", f"{time.monotonic() - began} {steps}")
    lamina.shutdown()


def reading():
    """Resumes where the disk is slow; rank WORDS[0], if any has that number, is killed a moment after the beginning."""
    job = Training(1024, optimizes=False)
    job.save(1)
    if lamina.rank() == int(WORDS[0]):
        threading.Timer(0.5, die).start()
    began = time.monotonic()
    assert job.resume() == 1
    note("took", str(time.monotonic() - began))
    lamina.shutdown()


def two():
    """Saves, as one of two jobs, into one tag: the second, WORDS[0], when the first has begun, and then again."""
    job = Training(1024)
    if WORDS[0] == "second":
        while not (FOLDER / "save-1_partial.lock").exists():
            time.sleep(0.01)
        try:
            job.save(1)
        except lamina.UsageError as error:
            note("refused", str(error))
        job.save(2)
    else:
        job.save(1)
    lamina.shutdown()


def leaves():
    """Comes to its end while a checkpoint is being saved: as WORDS[0] says by itself, or by an error."""
    job = Training(1024)
    job.save(1)
    job.save(2, asynchronous=True)
    if WORDS[0] == "error":
        raise ValueError("the script's own")


def interrupted():
    """Is interrupted while it saves for the second time, where the disk is slow."""
    job = Training(1024)
    job.save(1)
    job.save(2)


def failing():
    """Saves well, then into a folder that is refused, WORDS[0], and goes on elsewhere."""
    job = Training()
    job.save(1)
    errors = []
    for asynchronous in (False, True):
        try:
            job.save(2, folder=WORDS[0], asynchronous=asynchronous).wait()
        except lamina.FileError as error:
            errors.append(str(error))
        job.train()
    job.save(3)
    note("failed", "\n".join(errors))
    lamina.shutdown()


if __name__ == "__main__":
    noted(globals()[WHAT])
