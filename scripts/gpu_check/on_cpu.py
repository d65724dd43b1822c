# SPDX-License-Identifier: Apache-2.0
"""Jobs on the CPU of a machine with an accelerator: the engine, its transport and torch together, with no device in the
way. Alone, and of two ranks in each layout; all have the losses and parameters of plain torch."""

import os
import sys

os.environ["LAMINA_DEVICE"] = "cpu"

import torch
import training


def main():
    layouts = training.LAYOUTS if int(os.environ["WORLD_SIZE"]) > 1 else {"one rank": {}}
    return training.told(
        line
        for name, layout in layouts.items()
        for model in (training.MLP, training.GPT)
        for line in training.against_plain(name, model, torch.float64, 1e-9, **layout)
    )


if __name__ == "__main__":
    sys.exit(main())
