# SPDX-License-Identifier: Apache-2.0
"""Trains copies of a model by a Trainer, some of which die, and others come in their place: joining_trainer.py WAY
PLACE:RANK:BATCH..., with deaths of the ranks that began, see outliving_trainer.py. The others wait for newcomers
before they go on; there are BEGAN of FULL then, where others are started by hand, each with a NAME. Where a place is
`launcher`, each batch lasts, and the first one makes a file `now`.

Writes, of those who end, what they have heard and computed."""

import os
import sys
import time
from pathlib import Path

import outliving_trainer
import torch

import lamina
from lamina.trainer import Callback, Event

SELF = os.environ.get("NAME", "") + os.environ.get("RANK", "0")
BEGAN = int(os.environ.get("BEGAN", os.environ.get("WORLD_SIZE", 1)))
FULL = int(os.environ.get("FULL", BEGAN))
IS_NEW = "LAMINA_NEWCOMER" in os.environ
FOLDER, PATIENCE_S, SLOW_S = Path(os.environ.get("DIR", ".")), 60.0, 0.25


class Waits(Callback):
    """Lets newcomers come in time."""

    def run_event(self, event, state, logger):
        if event is Event.FIT_START:
            (FOLDER / f"{'ready' if IS_NEW else 'trains'}.{SELF}").write_text(str(os.getpid()))
        if event is Event.BATCH_START and "launcher" in outliving_trainer.PLACES.values():
            (FOLDER / "now").touch()
            time.sleep(SLOW_S)
        joins = ":" in os.environ["LAMINA_ELASTIC"]
        if event is not Event.BATCH_END or lamina.size() == FULL or not joins:
            return
        by = time.monotonic() + PATIENCE_S
        while self.count("ready.*") < FULL - BEGAN + self.count("death-*") and time.monotonic() < by:
            time.sleep(0.02)
        time.sleep(SLOW_S)

    def count(self, pattern):
        return len(list(FOLDER.glob(pattern)))


def main():
    way, *deaths = sys.argv[1:]
    for place, rank, batch in (each.split(":") for each in deaths):
        outliving_trainer.DEATHS[int(rank)] = None if IS_NEW else int(batch)
        outliving_trainer.PLACES[int(rank)] = place
    batch = outliving_trainer.BATCHES[BEGAN]
    trainer, *rest = outliving_trainer.trainer_of(way, BEGAN, batch, os.environ.get("SAVES"))
    trainer.state.callbacks.append(Waits())
    outliving_trainer.is_behind()
    found = outliving_trainer.trained(trainer, *rest)
    torch.save(found | {"is_new": IS_NEW}, FOLDER / f"end.{SELF}")


if __name__ == "__main__":
    main()
